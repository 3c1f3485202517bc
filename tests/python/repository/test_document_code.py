# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the README and of docs/ runs as it stands, and does what the page says."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ringattn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _commands import run_command
from _distributed import RankPool, this
from _documents import PAGES, ROOT, Names, blocks, output, run, shown
from _llama import random_ids, save, tiny_llama
from ringattn import Partition
from torch.profiler import ProfilerActivity, profile

Pools = Callable[[int], RankPool]
NUM_TOKENS = 21  # what pages assume of a sequence: no length that ranks divide


def assumed() -> Names:
    """What pages take for granted: modules, and an initialised group."""
    group = {"rank": this().rank, "world_size": this().world_size}
    return {"ringattn": ringattn, "torch": torch, "dist": dist, "F": F, **group}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def tensors(*heads: int, seq_len: int = NUM_TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, seq_len, num, 16, generator=generator) for num in heads]


def one_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


# ---- on every rank ------------------------------------------------------------------------------


def quickstart(texts: list[str]) -> list[str]:
    """The pool's group stands for the one that the example makes and ends."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return run(texts, {})


def hugging_face(texts: list[str], folder: Path) -> None:
    names = assumed() | {"folder": folder, "token_ids": random_ids(1, NUM_TOKENS)}
    run(texts, names)
    logits, ids = names["logits"], names["ids"]
    model = ringattn.unparallelize(names["model"])
    with torch.no_grad():
        close(logits, model(names["token_ids"]).logits)
        assert torch.equal(ids, model.generate(names["token_ids"], max_new_tokens=8))


def unequal(texts: list[str]) -> Partition:
    names = assumed()
    printed = run(texts, names)
    assert printed == str(names["plan"]).splitlines()
    return names["plan"].partition


def guide_to_unequal(texts: list[str]) -> None:
    """With fewer tokens: measuring and the model take as long as there are."""
    shorter = [text.replace("seq_len = 4096", "seq_len = 300") for text in texts]
    assert shorter != texts
    names = assumed()
    run(shorter, names)
    lengths = names["rebalancer"].plan(300).partition.lengths
    assert names["logits"].shape == (1, lengths[this().rank], 256)
    assert len(names["rebalancer"].speeds) == len(names["profiles"]) == this().world_size


def from_sdpa(before: str, after: str) -> None:
    torch.manual_seed(0)
    sizes = {"batch": 1, "seq_len": NUM_TOKENS, "heads": 4, "kv_heads": 2, "head_dim": 16}
    layers = {"wq": (32, 64), "wk": (32, 32), "wv": (32, 32), "wo": (64, 32)}
    module = SimpleNamespace(**{name: torch.nn.Linear(*size) for name, size in layers.items()})

    def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Of any layout: positions belong to the dimension that is as long."""
        turned = []
        for x in (q, k):
            shape = [n if n == len(positions) else 1 for n in x.shape[:3]]
            angles = positions.view(*shape, 1) * torch.logspace(0, -2, 8)
            a, b = x.chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        return turned

    names = assumed() | sizes | {"self": module, "rotary": rotary, "x": torch.randn(1, 21, 32)}
    with torch.no_grad():
        run([before], names)
        whole = names["out"]
        run([after], names)
    close(names["out"], names["p"].shard(whole, this().rank))


def positions(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    p = Partition.even(8, this().world_size)
    names = assumed() | {"p": p, "x": torch.zeros(1, p.lengths[this().rank], 4)}
    run(texts, names)
    return names["wrong"], names["right"]


def from_context_parallel(texts: list[str]) -> None:
    q, k, v = tensors(4, 2, 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (this().world_size,))
    context, function = texts
    names = assumed() | {"q": q, "k": k, "v": v, "mesh": mesh}
    run([function], names)
    close(names["out"], one_device(q, k, v))
    names |= {
        name: x.transpose(1, 2).contiguous() for name, x in zip("qkv", (q, k, v), strict=True)
    }
    run([context], names)
    close(names["p"].gather(names["out"], mesh, dim=2).transpose(1, 2), one_device(q, k, v))


def from_ring_flash_attn(same_name: str, causal: str, contiguous: str) -> None:
    size = this().world_size
    whole = tensors(4, 2, 2, seq_len=2 * size * 5)
    settings: Names = {"scale": None, "group": dist.group.WORLD}

    chunks = [x.chunk(2 * size, 1) for x in whole]  # as that package deals them out
    shards = [torch.cat((x[this().rank], x[-1 - this().rank]), 1) for x in chunks]
    names = assumed() | settings | dict(zip("qkv", shards, strict=True))
    run([causal], names)
    out = names["out"]
    close(out, names["p"].shard(one_device(*whole), this().rank))
    run([same_name], names)
    assert torch.equal(names["out"], out)

    shards = [x.chunk(size, 1)[this().rank] for x in whole]
    names = assumed() | settings | dict(zip("qkv", shards, strict=True))
    run([contiguous], names)
    close(names["out"], one_device(*whole, causal=False).chunk(size, 1)[this().rank])


def from_transformers(blocks: list[str], folder: Path) -> None:
    before, after, before_own, after_own = blocks
    names = assumed() | {"folder": folder, "device": "cpu", "prompt_ids": random_ids(1, 9)}
    run([before], names)
    last, ids = names["last"], names["ids"]
    run([after], names)
    close(names["last"], last)
    assert torch.equal(names["ids"], ids)
    run([before_own], names)
    ids = names["ids"]
    run([after_own], names)
    assert names["ids"].shape == ids.shape  # bfloat16: where two tokens are near, either may win


def from_diffusers(before: str, after: str) -> None:
    import _diffusers as tiny
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    given = tiny.wan_inputs(4 * this().world_size)
    expected = tiny.sample(tiny.wan(), given)
    with tiny.cpu_as_accelerator(), attention_backend(AttentionBackendName.NATIVE):
        for text in (before, after):
            names = assumed() | {"model": tiny.wan(), "inputs": given}
            run([text], names)
            tiny.close(names["out"], expected)


def from_fms(before: str, after: str, calls: str, strategy: str, folder: Path) -> None:
    names = assumed() | {"folder": folder, "prompt_ids": random_ids(1, 9)}
    names["token_ids"] = random_ids(1, NUM_TOKENS)
    run([before], names)
    ids = names["ids"]
    run([after], names)
    assert torch.equal(names["ids"], ids)
    run([calls], names)
    with torch.no_grad():
        close(names["logits"], names["model"](names["token_ids"]))
        close(names["last"], names["logits"][:, -1:])
        run([strategy], names)
        close(names["model"](names["token_ids"]), names["logits"])


def ring_of_its_own(texts: list[str]) -> None:
    whole = tensors(4, 2, 2)
    p = Partition.even(NUM_TOKENS, this().world_size)
    q, k, v = (p.shard(x, this().rank) for x in whole)
    names = assumed() | {"p": p, "q": q, "k": k, "v": v}
    run(texts, names)
    close(names["out"], p.shard(one_device(*whole, causal=False), this().rank))


def synchronized(texts: list[str]) -> None:
    whole = tensors(4, 2, 2)
    p = Partition.even(NUM_TOKENS, this().world_size)
    shards = (p.shard(x, this().rank) for x in whole)
    names = assumed() | {"p": p} | dict(zip("qkv", shards, strict=True))
    run(texts, names)
    close(names["out"], p.shard(one_device(*whole), this().rank))


def allocated(lengths: list[int]) -> list[int]:
    """Sizes in bytes that one call asks the allocator for, but for those of attention itself."""
    p = Partition.zigzag(lengths)
    q, k, v = (p.shard(x, this().rank) for x in tensors(8, 2, 2, seq_len=p.seq_len))
    ringattn.ring_attention(q, k, v, p)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        ringattn.ring_attention(q, k, v, p)
    events = profiled.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


def allocated_in_training(lengths: list[int]) -> tuple[list[int], list[int]]:
    """Bytes that this rank's backward allocates, and of each tensor that is kept for it."""
    p = Partition.zigzag(lengths)
    shards = [p.shard(x, this().rank) for x in tensors(8, 2, 2, seq_len=p.seq_len)]
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    for _ in range(2):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = ringattn.ring_attention(*(x.clone().requires_grad_() for x in shards), p)
        gradient = torch.ones_like(out)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            out.backward(gradient)
    events = profiled.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]"], sorted(kept.values())


# ---- tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"))


#: Pages and sections whose blocks a test below runs.
RUN = {
    "README.md": ["Example", "Unequal GPUs"],
    "docs/errors.md": ["On CUDA, errors may come later"],
    "docs/heterogeneity.md": ["Three steps", "Speeds that change"],
    "docs/masks.md": [  # by test_masks_page.py
        "A window",
        "Packed documents",
        "Queries after other keys",
        "Sinks and softcap",
        "A table of one device",
    ],
    "docs/memory.md": ["During one `ring_attention` call", "In a step of training"],
    "docs/migrating.md": [
        "From `F.scaled_dot_product_attention`",
        "Positions: the classic mistake",
        "From `context_parallel`",
        "From `ring_flash_attn`",
        "From Hugging Face transformers",
        "From diffusers",
        "From FMS",
        "From a ring of your own",
    ],
    "docs/programs.md": [  # by test_program_page.py
        "First, under torchrun",
        'Even, a list of lengths, "auto", `plan`',
        "A data loader",
        "Threads",
        "Time a call",
    ],
    "docs/training.md": [
        "The rules",
        "Unequal ranks",
        "Hugging Face models",
    ],  # by test_training_page.py
    "docs/transports.md": ["Start"],
}


def test_every_block_is_run_or_says_why_not() -> None:
    code = [x for page in PAGES for x in blocks(page) if x.language == "python"]
    runs: dict[str, list[str]] = {}
    for block in code:
        compile(block.text, block.page, "exec")
        sections = runs.setdefault(block.page, [])
        if block.not_run is None and block.section not in sections:
            sections.append(block.section)
    assert {page: sections for page, sections in runs.items() if sections} == RUN
    reasons = [block.not_run for block in code if block.not_run is not None]
    others = [
        "needs GPUs",
        "test_trainer.py trains and evaluates so",
        "needs GPUs and the package ring_flash_attn",
        "test_trainer.py trains so",
    ]
    assert reasons == others + 3 * ["needs four ranks"]


def test_the_readme_shows_the_example_that_is_there() -> None:
    example = (ROOT / "examples/quickstart.py").read_text()
    assert shown("README.md", "Example")[0] == example.split("\n", 2)[2]  # no license, no command


def test_the_example_prints_what_the_readme_shows(rank_pool: Pools) -> None:
    lines = [line for (line,) in rank_pool(3).run(quickstart, shown("README.md", "Example")[:1])]
    owned = [line.rsplit(" ", 1)[0] for line in lines]
    assert owned == [line.rsplit(" ", 1)[0] for line in output("README.md", "Example")]
    assert all(float(line.rsplit(" ", 1)[1]) < 1e-6 for line in lines)


def test_the_chat_of_the_examples_is_that_of_one_rank(rank_pool: Pools) -> None:
    example = (ROOT / "examples/hugging_face_chat.py").read_text()
    shares = ", partition=[3, 1]"
    assert shares in example
    (one,) = rank_pool(1).run(quickstart, [example.replace(shares, "")])
    assert rank_pool(2).run(quickstart, [example]) == [one, []]
    assert "main" in "".join(one)


def test_the_chat_about_a_document_times_its_turns() -> None:
    done = run_command(["examples/chat.py"], ranks=2)
    assert done.returncode == 0, done.stderr
    turns = re.findall(r"^(\d+) tokens after (\d+), 16 generated: [\d.]+ s$", done.stdout, re.M)
    assert [int(before) for _, before in turns] == [0, 3015, 3057, 3082]


def test_a_model_of_transformers_runs_as_the_readme_shows(rank_pool: Pools, folder: Path) -> None:
    rank_pool(2).run(hugging_face, shown("README.md", "Example")[1:], folder)


def test_the_plan_of_the_readme_is_made(rank_pool: Pools) -> None:
    one, other = rank_pool(2).run(unequal, shown("README.md", "Unequal GPUs"))
    assert one == other and one.seq_len == 4096


def test_the_guide_to_unequal_gpus_plans_and_follows(rank_pool: Pools) -> None:
    sections = ("Three steps", "Speeds that change")
    rank_pool(2).run(guide_to_unequal, shown("docs/heterogeneity.md", *sections))


def migrating(section: str) -> list[str]:
    return shown("docs/migrating.md", section)


def test_code_from_sdpa_gives_the_same(rank_pool: Pools) -> None:
    rank_pool(2).run(from_sdpa, *migrating("From `F.scaled_dot_product_attention`"))


def test_positions_are_those_that_the_page_lists(rank_pool: Pools) -> None:
    section = "Positions: the classic mistake"
    ranks = rank_pool(2).run(positions, migrating(section))
    text = (ROOT / "docs/migrating.md").read_text()
    for wrong, right in ranks:
        assert f"`{right.tolist()}`" in text
        assert wrong.tolist() == [0, 1, 2, 3] != right.tolist()


def test_code_from_context_parallel_gives_the_same(rank_pool: Pools) -> None:
    rank_pool(2).run(from_context_parallel, migrating("From `context_parallel`"))


def test_code_from_ring_flash_attn_gives_the_same(rank_pool: Pools) -> None:
    rank_pool(2).run(from_ring_flash_attn, *migrating("From `ring_flash_attn`"))


def test_code_from_transformers_gives_the_same(rank_pool: Pools, folder: Path) -> None:
    rank_pool(2).run(from_transformers, migrating("From Hugging Face transformers"), folder)


def test_code_from_diffusers_gives_the_same(rank_pool: Pools) -> None:
    pytest.importorskip("diffusers")
    rank_pool(2).run(from_diffusers, *migrating("From diffusers"))


def test_code_from_fms_gives_the_same(rank_pool: Pools, folder: Path) -> None:
    pytest.importorskip("fms")
    rank_pool(2).run(from_fms, *migrating("From FMS"), folder)


def test_a_ring_of_rotations_gives_the_same(rank_pool: Pools) -> None:
    rank_pool(2).run(ring_of_its_own, migrating("From a ring of your own"))


def test_errors_are_waited_for_as_shown(rank_pool: Pools) -> None:
    rank_pool(2).run(synchronized, shown("docs/errors.md", "On CUDA, errors may come later"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without GPUs does")
def test_a_group_is_started_as_shown() -> None:
    with mock.patch.object(dist, "init_process_group") as started:
        run(shown("docs/transports.md", "Start"), {})
    started.assert_called_once_with("gloo")


def test_the_memory_page_shows_what_the_planner_says() -> None:
    for section in RUN["docs/memory.md"]:
        printed = run(shown("docs/memory.md", section), {"ringattn": ringattn})
        assert printed == output("docs/memory.md", section)


def test_a_call_allocates_what_the_memory_page_counts(rank_pool: Pools) -> None:
    lengths, heads, kv_heads, head_dim = [300, 200, 100], 8, 2, 16
    token_bytes = 2 * kv_heads * head_dim * 4  # K
    cost = ringattn.ModelCost.attention_only(
        heads, head_dim, num_kv_heads=kv_heads, dtype=torch.float32
    )
    assert cost.kv_bytes == token_bytes
    halves = [150, 100, 50]
    # Rank 0 is the outermost: it sees others whole, they see its head half; and so on inwards.
    sent = [halves[0], lengths[1], lengths[2]]
    visiting = [[lengths[1], lengths[2]], [halves[0], lengths[2]], [halves[0], halves[1]]]
    for rank, sizes in enumerate(rank_pool(3).run(allocated, lengths)):
        out = 4 * lengths[rank] * heads * head_dim
        lse = 4 * lengths[rank] * heads
        buffers = [token_bytes * rows for rows in (sent[rank], *visiting[rank])]
        for size in (out, lse, *buffers):  # out and state have one size in float32
            assert size in sizes, f"rank {rank} must allocate {size} bytes, got {sizes}"
        assert sizes.count(out) >= 2
        assert sum(buffers) <= token_bytes * sum(lengths)


def test_a_training_step_keeps_and_allocates_what_the_memory_page_counts(rank_pool: Pools) -> None:
    lengths, heads, kv_heads, head_dim = [300, 200, 100], 8, 2, 16
    cost = ringattn.ModelCost.attention_only(heads, head_dim, num_kv_heads=kv_heads)
    profiles = [ringattn.RankProfile(1, 1, max_tokens=most) for most in lengths]
    plan = ringattn.plan(600, profiles, cost, training=True)
    assert list(plan.partition.lengths) == lengths
    halves = [150, 100, 50]
    visiting = [[lengths[1], lengths[2]], [halves[0], lengths[2]], [halves[0], halves[1]]]
    returning = [[halves[0], halves[0]], [lengths[1], halves[1]], [lengths[2], lengths[2]]]
    sent = [halves[0], lengths[1], lengths[2]]
    row = 2 * kv_heads * head_dim * 4  # float32: of a block, and of gradients
    for rank, (sizes, kept) in enumerate(rank_pool(3).run(allocated_in_training, lengths)):
        tokens = lengths[rank]
        query = 4 * tokens * heads * head_dim
        key = 4 * tokens * kv_heads * head_dim
        assert kept == sorted([query, query, key, key, 4 * tokens * heads])
        blocks = [row * rows for rows in (sent[rank], *visiting[rank])]
        # Own ones, and a buffer for each of two steps each way.
        gradients = [row * n for n in (tokens, *visiting[rank], *returning[rank])]
        for size in (query, *blocks, *gradients):
            assert size in sizes, f"rank {rank} must allocate {size} bytes, got {sizes}"
        # Of keys and values in 16 bits: half as much for blocks.
        assert plan.memory_bytes[rank] == sum(blocks) // 2 + sum(gradients)
