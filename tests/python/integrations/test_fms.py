# SPDX-License-Identifier: Apache-2.0
"""Models of FMS over the ring: outputs and tokens are those of the unmodified model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
from _commands import run_command
from _distributed import RankPool, this
from _fms import MODELS, SIZES, check_close, initialized, padded, prompt, real, tiny, two_of
from ringattn import Partition
from ringattn.integrations import fms as ring_fms

fms_models = pytest.importorskip("fms.models")
fms_generation = pytest.importorskip("fms.utils.generation")

Pools = Callable[..., RankPool]

#: Even; weights that give some rank nothing; lengths that a sequence of 13 gets as they are.
SPLITS: dict[int, list[Any]] = {
    1: [None],
    2: [None, [0, 1], Partition.contiguous([9, 4])],
    3: [None, [5, 0, 3], Partition.zigzag([6, 2, 5], order=[2, 0, 1])],
    4: [None, [1, 0, 0, 9], Partition.contiguous([4, 3, 5, 1])],
}


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, **options}
    return fms_generation.generate(model, ids, **settings)


# ---- on every rank ------------------------------------------------------------------------------


@torch.no_grad()
def outputs_are_equal(name: str, splits: list[Any]) -> None:
    plain, model = two_of(name)
    for partition in splits:
        ringattn.parallelize(model, partition=partition)
        rows: list[int] = []
        body = model.base_model
        after = body.register_forward_hook(
            lambda _, args, out, rows=rows: rows.append(out[0].size(1))
        )
        for num_tokens in (1, 3, 13):
            ids = prompt(2, num_tokens)
            check_close(model(ids), plain(ids))
            # All three are one row; more than there are means all.
            for options in ({"last_n_tokens": 1}, {"last_n_tokens": 99}, {"only_last_token": True}):
                check_close(model(ids, **options), plain(ids, **options))
            # No others are put together; GptOss of FMS has no last_n_tokens.
            assert rows[-3:] == [num_tokens if name == "gpt_oss" else 1, num_tokens, 1]
        after.remove()
        positional = (ids, None, None, False, 2)
        check_close(model(*positional), plain(*positional))
        with torch.inference_mode():
            check_close(model(ids), plain(ids))


@torch.no_grad()
def padding_is_left_out(name: str) -> None:
    plain, model = two_of(name)
    ringattn.parallelize(model)
    for side in ("left", "right"):
        for lengths in ((1, 9), (4, 9, 6), (5, 5)):
            ids, extra = padded(*lengths, side=side)
            logits, _ = model(ids, use_cache=True, **extra)
            expected, _ = plain(ids, use_cache=True, **extra)
            check_close(logits, expected)  # of padding, too
            check_close(model(ids, **extra), expected)
            for last in (1, 3, 8):
                expected = plain(ids, last_n_tokens=last, use_cache=True, **extra)[0]
                check_close(model(ids, last_n_tokens=last, **extra), expected)
    # Hugging Face's masks let all queries see what is no padding.
    ids, extra = padded(4, 9)
    keys = real(4, 9)[:, None, None, :].to(ids.device)
    extra["mask"] = keys.expand(-1, -1, 9, -1).tril() | torch.eye(9, dtype=torch.bool).to(keys)
    check_close(model(ids, **extra)[real(4, 9)], plain(ids, **extra)[real(4, 9)])


def tokens_are_equal(name: str) -> None:
    plain, model = two_of(name)
    ringattn.parallelize(model)
    ids = prompt(2, 7)
    expected = greedy(plain, ids)
    assert torch.equal(greedy(model, ids), expected)  # under grad mode, as FMS leaves it
    assert torch.equal(greedy(model, ids, use_cache=False), expected)
    assert torch.equal(ring_fms.generate(model, ids, max_new_tokens=8, do_sample=False), expected)
    one = greedy(plain, ids[0], contiguous_cache=True)
    assert torch.equal(greedy(model, ids[0], contiguous_cache=True), one)
    ids, extra = padded(1, 6, 3)
    expected = greedy(plain, ids, extra_kwargs=extra)
    assert torch.equal(greedy(model, ids, extra_kwargs=extra), expected)
    # Unmodified FMS drops causality here.
    assert torch.equal(greedy(model, ids, use_cache=False, extra_kwargs=extra), expected)


@torch.no_grad()
def axes_are_not_mixed_up() -> None:
    """FMS takes two tokens for the two kv heads of this model where it keeps no cache."""
    plain, model = two_of()
    ringattn.parallelize(model)
    check_close(model(prompt(2, 2)), plain(prompt(2, 2), use_cache=True)[0])


def ranks_draw_the_same() -> torch.Tensor:
    model = ringattn.parallelize(tiny())
    torch.manual_seed(this().rank)
    seen = []

    def look(position: int, logits: Any, tokens: torch.Tensor, kwargs: Any) -> Any:
        seen.append(position)
        return tokens, kwargs

    settings = {"max_new_tokens": 12, "use_cache": True, "post_iteration_hook": look}
    ids = ring_fms.generate(model, prompt(2, 5), temperature=3.0, **settings)
    assert seen == list(range(5, 17))
    return ids


def own_tokens() -> None:
    model = ringattn.parallelize(tiny())
    torch.manual_seed(this().rank)
    greedy(model, prompt(2, 5), do_sample=True, temperature=9.0, max_new_tokens=16)


@torch.no_grad()
def other_prompts() -> None:
    model = ringattn.parallelize(tiny())
    message = "x must be the same on all ranks, got different ones"
    with pytest.raises(ValueError, match=message):
        model(prompt(1, 6, seed=this().rank))
    check_close(model(prompt(1, 6)), tiny()(prompt(1, 6)))  # the group works on


@torch.no_grad()
def steps_follow_the_cache() -> None:
    plain, model = two_of()
    ringattn.parallelize(model, partition=[1] * (this().world_size - 1) + [4])
    ids = prompt(2, 50)
    expected = plain(ids)
    logits, cache = model(ids[:, :6], use_cache=True)
    check_close(logits, expected[:, :6])
    branch = copy.deepcopy(cache)
    for first, last in ((6, 7), (7, 11), (11, 12), (12, 48), (48, 50)):  # a long one is spread
        step = {"past_key_value_states": cache, "use_cache": True}
        logits, cache = model(ids[:, first:last], **step)
        check_close(logits, expected[:, first:last])
        with pytest.raises(ValueError, match="must be the newest of their sequence"):
            model(ids[:, first:last], **step)
    other = model(ids[:, 6:7], past_key_value_states=branch, use_cache=True, last_n_tokens=1)[0]
    check_close(other, expected[:, 6:7])


@torch.no_grad()
def steps_follow_a_padded_prompt() -> None:
    plain, model = two_of()
    ringattn.parallelize(model)
    # More columns than positions that the model knows, of which these prompts use few.
    ids, extra = padded(4, 9, min_pad_length=64)
    results = []
    for each in (plain, model):
        logits, cache = each(ids, use_cache=True, **extra)
        mask = torch.nn.functional.pad(extra["mask"][:, -1:], (0, 1))
        step = {"position_ids": extra["position_ids"][:, -1:] + 1, "mask": mask}
        if each is model:
            step.pop("mask")  # it goes on with the prompt's
        logits, _ = each(ids[:, :1], past_key_value_states=cache, use_cache=True, **step)
        results.append(logits)
    check_close(*results[::-1])


def attributes(model: torch.nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


@torch.no_grad()
def models_come_off() -> None:
    plain, model = two_of()
    before, keys = attributes(model), list(model.state_dict())
    ids = prompt(2, 9)
    assert ringattn.parallelize(model) is model
    assert ringattn.parallelize(model, partition=[1] * this().world_size) is model
    assert list(model.state_dict()) == keys
    on_ring = model(ids)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(other(ids), on_ring)
    ringattn.unparallelize(model)
    assert torch.equal(model(ids), plain(ids)) and attributes(model) == before
    check_close(other(ids), on_ring)  # the copy is on the ring still
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other(ids), on_ring)
    ringattn.unparallelize(ringattn.unparallelize(other))
    assert torch.equal(other(ids), plain(ids))


@torch.no_grad()
def bodies_run() -> None:
    from fms.models.hf import to_hf_api  # takes seconds

    plain, model = two_of("granite")
    ringattn.parallelize(model)
    ids, mask = prompt(2, 9), torch.ones(2, 9, dtype=torch.int64, device=this().device)
    expected, _ = plain.base_model(ids)
    check_close(model.base_model(ids)[0], expected)
    check_close(model.base_model(plain.base_model.embedding(ids))[0], expected)
    adapted = [to_hf_api(each)(ids, attention_mask=mask).logits for each in (model, plain)]
    check_close(*adapted)
    ringattn.parallelize(model.base_model)  # instead of the whole model
    assert "forward" not in vars(model)
    check_close(model(ids, last_n_tokens=2), plain(ids, last_n_tokens=2))


@torch.no_grad()
def strategies_attach() -> None:
    plain, ids = tiny(), prompt(2, 9)
    strategy = ring_fms.RingAttentionStrategy(block_lens=[4] + [1] * (this().world_size - 1))
    model = tiny(distributed_strategy=strategy)
    check_close(model(ids, last_n_tokens=1), plain(ids, last_n_tokens=1))
    assert torch.equal(copy.deepcopy(model)(ids), model(ids))
    ringattn.unparallelize(model)
    assert torch.equal(model(ids), plain(ids))
    check_close(strategy.attach(model)(ids), plain(ids))
    assert not torch.nn.modules.module._global_module_registration_hooks


@torch.no_grad()
def models_load_onto_the_ring(folder: str) -> None:
    settings = {**SIZES, "model_path": f"{folder}/model.pth", "source": "fms"}
    ids, expected = prompt(2, 9), tiny()(prompt(2, 9))
    lengths = [4] + [1] * (this().world_size - 1)
    strategy = ring_fms.RingAttentionStrategy(lengths)
    for how in (
        {"distributed_strategy": "ring"},
        {"distributed_strategy": "ring", "block_lens": lengths},
        {"distributed_strategy": strategy},
    ):
        model = ring_fms.get_model("llama", "micro", **settings, **how).eval()
        check_close(model.to(ids.device)(ids), expected)
    with pytest.raises(KeyError, match="not a registered variant"):
        ring_fms.get_model("llama", "nano", distributed_strategy="ring")


@torch.no_grad()
def two_by_two(folder: str) -> torch.Tensor:
    """Tensor parallelism over neighbours, rings over those of equal weights."""
    copies = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    plain, rank = tiny(), this().rank
    model = fms_models.get_model(
        *("llama", "micro"),
        model_path=f"{folder}/model.pth",
        source="fms",
        distributed_strategy="tp",
        group=copies[rank // 2],
        **SIZES,
    ).eval()
    model.to(this().device).post_init()
    ring_fms.RingAttentionStrategy([5, 2], group=rings[rank % 2]).attach(model)
    check_close(model(prompt(2, 9)), plain(prompt(2, 9)))
    assert torch.equal(greedy(model, prompt(2, 7)), greedy(plain, prompt(2, 7)))
    torch.manual_seed(rank)
    drawn = ring_fms.generate(model, prompt(2, 5), max_new_tokens=8, temperature=3.0)
    for group in (*copies, *rings):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return drawn


@torch.no_grad()
def converted(folder: str, ids: torch.Tensor) -> torch.Tensor:
    model = ring_fms.get_model("hf_pretrained", model_path=folder, distributed_strategy="ring")
    return model.eval()(ids)


# ---- tests --------------------------------------------------------------------------------------


@pytest.mark.nccl
def test_outputs_are_those_of_one_process(ring: RankPool) -> None:
    ring.run(outputs_are_equal, "llama", SPLITS[ring.world_size])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_other_models_give_their_outputs_and_tokens(rank_pool: Pools, name: str) -> None:
    rank_pool(2).run(outputs_are_equal, name, [[3, 1]])
    rank_pool(2).run(tokens_are_equal, name)


@pytest.mark.nccl
def test_padded_rows_are_those_of_one_process(ring: RankPool) -> None:
    ring.run(padding_is_left_out, "llama")


@pytest.mark.parametrize("name", ["granite_swa", "gpt_oss"])
def test_padded_rows_of_windows_and_sinks_are_those_of_one_process(
    rank_pool: Pools, name: str
) -> None:
    rank_pool(2).run(padding_is_left_out, name)


@pytest.mark.nccl
def test_greedy_tokens_are_those_of_one_process(ring: RankPool) -> None:
    ring.run(tokens_are_equal, "llama")


def test_two_tokens_are_no_heads(rank_pool: Pools) -> None:
    rank_pool(2).run(axes_are_not_mixed_up)


def test_every_rank_draws_the_tokens_of_the_first(rank_pool: Pools) -> None:
    first, *others = rank_pool(3).run(ranks_draw_the_same)
    assert all(torch.equal(ids, first) for ids in others)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def test_ranks_that_draw_their_own_tokens_get_an_error(rank_pool: Pools, kind: str) -> None:
    for outcome in rank_pool(2, kind).outcomes(own_tokens):
        assert outcome.error == "ValueError"
        assert "generate with ringattn.integrations.fms.generate()" in outcome.message


def test_ranks_with_other_prompts_get_an_error(rank_pool: Pools) -> None:
    rank_pool(2).run(other_prompts)


@pytest.mark.nccl
def test_steps_go_on_after_the_prompt(ring: RankPool) -> None:
    ring.run(steps_follow_the_cache)
    ring.run(steps_follow_a_padded_prompt)


def test_models_come_off_the_ring_as_they_were(rank_pool: Pools) -> None:
    rank_pool(2).run(models_come_off)


def test_bodies_and_adapted_models_run(rank_pool: Pools) -> None:
    rank_pool(2).run(bodies_run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fms")
    torch.save(initialized(MODELS["llama"]()).state_dict(), path / "model.pth")
    return str(path)


def test_a_strategy_puts_models_on_the_ring(rank_pool: Pools, folder: str) -> None:
    rank_pool(3).run(strategies_attach)
    rank_pool(2).run(models_load_onto_the_ring, folder)


def test_tensor_parallelism_and_the_ring_go_together(rank_pool: Pools, folder: str) -> None:
    first, *others = rank_pool(4).run(two_by_two, folder)
    assert all(torch.equal(ids, first) for ids in others)


def test_rotations_of_hugging_face_are_kept_or_refused(rank_pool: Pools, tmp_path: Any) -> None:
    import transformers  # takes seconds
    from _llama import LLAMA3_ROPE, random_ids, save, tiny_llama

    def of(rope: dict[str, Any]) -> Any:
        if int(transformers.__version__.split(".")[0]) >= 5:
            return tiny_llama(rope_parameters=rope)
        return tiny_llama(rope_scaling=rope, rope_theta=rope["rope_theta"])

    theirs, ids = of(LLAMA3_ROPE), random_ids(1, 40)
    folder = save(theirs, tmp_path / "llama3")
    with torch.no_grad():
        expected = theirs(ids).logits
    for logits in rank_pool(2).run(converted, str(folder), ids):
        check_close(logits, expected)
    linear = of({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    folder = save(linear, tmp_path / "linear")
    message = "rotary embedding must be one that FMS computes for llama, got 'linear'"
    for outcome in rank_pool(2).outcomes(converted, str(folder), ids):
        assert message in outcome.message


def test_the_examples_run() -> None:
    done = run_command(["examples/fms_generate.py"], ranks=2)
    assert done.returncode == 0, done.stderr
    text, given, _ = done.stdout.partition("parser = argparse.")
    prompt_ids = torch.tensor([list((text + given).encode())])
    model = ringattn.models.load_model(ringattn.models.demo_model_path())
    expected = ringattn.generate(model, prompt_ids, max_new_tokens=40, eos_token_id=None)
    assert done.stdout.encode() == bytes(expected[0].tolist()) + b"\n"
    done = run_command(["examples/fms_parallelize.py"], ranks=2)
    assert done.stdout.count("same tokens: True") == 2, done.stderr
