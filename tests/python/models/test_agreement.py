# SPDX-License-Identifier: Apache-2.0
"""What ranks give to our LLaMA must be the same on all of them, and checksums tell."""

from collections.abc import Callable

import pytest
import ringattn
import torch
from _agreement import DEVICES, refusal, returns_while_the_gpu_is_busy
from _distributed import AT_ONCE_S, RankPool, this
from _llama import VOCABULARY, random_ids
from ringattn._distributed.checksums import bits_checksum, chained, checksum, number_of
from ringattn._distributed.groups import resolve_group
from ringattn._distributed.one_rank import OnOneRank
from ringattn.models import LLaMA, LLaMAConfig

Pools = Callable[..., RankPool]


def tiny() -> LLaMA:
    torch.manual_seed(0)
    config = LLaMAConfig(src_vocab_size=VOCABULARY, emb_dim=32, nheads=4, kvheads=2, nlayers=2)
    return LLaMA(config, device=this().device).requires_grad_(False)


def ids(seed: int = 0) -> torch.Tensor:
    return random_ids(2, 8, seed=seed).to(this().device)


def forwards_that_differ() -> list[str]:
    model, errors, rank = tiny(), [], this().rank
    partition = ringattn.Partition.even(8, 2)

    def call(token_ids: torch.Tensor) -> torch.Tensor:
        return model(token_ids, partition)

    right = call(ids())
    for mine in (ids(seed=rank), ids().flip(rank)):
        errors.append(refusal(call, mine, ids(), "on all ranks"))
        assert torch.equal(call(ids()), right)
    return errors


@pytest.mark.parametrize("device_type", DEVICES)
def test_ids_that_differ_fail_every_rank_at_once_or_a_call_later(
    rank_pool: Pools, device_type: str
) -> None:
    message = "token_ids must be the same on all ranks, got different ones on ranks 0 and 1"
    for outcome in rank_pool(2, device_type).outcomes(forwards_that_differ):
        assert outcome.value == [message, message], outcome.traceback


def calls_while_the_gpu_is_busy() -> bool:
    model, partition = tiny(), ringattn.Partition.even(8, 2)
    given = ids()
    return returns_while_the_gpu_is_busy(lambda: model(given, partition))


@pytest.mark.multi_gpu(size=2)
@pytest.mark.nccl
def test_a_call_does_not_wait_for_the_gpu(rank_pool: Pools) -> None:
    assert rank_pool(2, "cuda").run(calls_while_the_gpu_is_busy) == [True, True]


def shown_on_one_rank() -> str:
    model = tiny()

    def show(tokens: torch.Tensor) -> None:
        if this().rank == 1:
            raise KeyError("no terminal")

    with pytest.raises((KeyError, ValueError)) as error:
        ringattn.generate(model, random_ids(1, 9), max_new_tokens=3, on_tokens=show)
    ringattn.generate(model, random_ids(1, 9), max_new_tokens=3)
    return str(error.value)


def test_what_shows_tokens_may_fail_on_one_rank(rank_pool: Pools) -> None:
    first, second = rank_pool(2).outcomes(shown_on_one_rank)
    assert first.value == "rank 1: 'no terminal'", first.traceback
    assert second.value == "'no terminal'", second.traceback


def failed_on_one_rank(generates: bool) -> str:
    model, partition = tiny(), ringattn.Partition.even(8, 2)

    def call() -> torch.Tensor:
        if generates:
            return ringattn.generate(model, ids(), max_new_tokens=2)
        return model(ids(), partition)

    right = call()
    feed_forward = model.base_model.layers[0].ff_sub_layer
    if this().rank == 1:
        feed_forward.forward = lambda x: x.nothing
    with pytest.raises((AttributeError, ValueError)) as error:
        call()
    vars(feed_forward).pop("forward", None)
    assert torch.equal(call(), right)
    return str(error.value)


@pytest.mark.parametrize("generates", [False, True], ids=["forward", "generate"])
def test_a_layer_that_fails_on_one_rank_is_an_error_on_all(
    rank_pool: Pools, generates: bool
) -> None:
    first, second = rank_pool(2).outcomes(failed_on_one_rank, generates)
    assert second.value == "'Tensor' object has no attribute 'nothing'", second.traceback
    assert first.value == f"rank 1: {second.value}", first.traceback
    assert first.seconds < AT_ONCE_S


def computed_on_one_rank(callers: bool, culprit: int) -> tuple[str, str]:
    ring = resolve_group(None)
    rank = ring.rank
    draw = OnOneRank(ring, 1, "draw a token", callers=callers)

    def compute() -> torch.Tensor:
        if rank == culprit:
            raise KeyError("nothing")
        return torch.tensor([rank, rank + 10])

    with pytest.raises((KeyError, RuntimeError)) as error:
        draw(2, this().device, compute)
    culprit = -1
    assert draw(2, this().device, compute).tolist() == [1, 11]
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("callers", [True, False])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_on_any_rank_is_one_of_all(rank_pool: Pools, callers: bool, culprit: int) -> None:
    error = ("RuntimeError", f"rank {culprit} could not draw a token: 'nothing'")
    for rank, got in enumerate(rank_pool(3).run(computed_on_one_rank, callers, culprit)):
        assert got == (("KeyError", "'nothing'") if callers and rank == culprit else error)


def test_checksums_of_other_integers_are_others() -> None:
    pairs = torch.cartesian_prod(*[torch.arange(40)] * 2)
    assert len({int(checksum(pair)) for pair in pairs}) == len(pairs)
    ids = random_ids(2, 50)
    for other in (ids.flip(0), ids.flip(1), ids + 1, ids.roll(1, 1)):
        assert int(checksum(ids)) != int(checksum(other))
    assert int(checksum(ids)) == int(checksum(ids.int())) == int(checksum(ids.t().contiguous().t()))


def test_checksums_of_bits_see_the_place_of_each_row() -> None:
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    weight[2, 3] = torch.nan
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        x = weight.nan_to_num().to(dtype) if dtype == torch.int8 else weight.to(dtype)
        assert int(bits_checksum(x)) == int(bits_checksum(x.clone()))
        for y in (x.flip(0), x[[1, 0, *range(2, 7)]], x.roll(1), -x):
            assert int(bits_checksum(x)) != int(bits_checksum(y))
    assert int(bits_checksum(weight[:0])) == 0
    assert int(bits_checksum(weight.t())) == int(bits_checksum(weight.t().contiguous()))


def test_checksums_of_large_tensors_are_those_of_their_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    whole = int(bits_checksum(x))
    monkeypatch.setattr("ringattn._distributed.checksums._CHUNK", 7)
    assert int(bits_checksum(x)) == whole


def test_histories_on_host_and_device_are_the_same() -> None:
    numbers = [number_of("one"), number_of(None), -(2**63)]
    on_device = [torch.tensor(number) for number in numbers]
    assert chained(0, *numbers) == int(chained(torch.tensor(0), *on_device))
    assert chained(0, 1, 2) != chained(0, 2, 1)
