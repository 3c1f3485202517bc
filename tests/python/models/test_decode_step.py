# SPDX-License-Identifier: Apache-2.0
"""Tokens through CUDA graphs are those of the model itself; where a replay would not do what the
model does, the model runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _distributed import RankPool, this
from _llama import LLAMA3_ROPE, random_ids, save, tiny_llama
from ringattn import generation
from ringattn.generation import decode, generate
from ringattn.models import LLaMA, load_model
from ringattn.models.decode_step import DecodeStep, misfit, replayable
from ringattn.partition import Partition
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

PROMPT_LEN, NEW_TOKENS = 23, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE)
    return save(theirs, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> LLaMA:
    return load_model(folder)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of tokens that went through graphs."""
    positions: list[int] = []
    call = DecodeStep.__call__

    def counted(self: DecodeStep, token_ids: torch.Tensor) -> torch.Tensor:
        if self._graphs:
            positions.append(self._cache.seq_len)
        return call(self, token_ids)

    monkeypatch.setattr(DecodeStep, "__call__", counted)
    return positions


def new_tokens(model: LLaMA, **options: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, **options}
    return generate(model, random_ids(2, PROMPT_LEN), **settings)[:, PROMPT_LEN:]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 3}, {"top_k": 20}], ids=["greedy", "seed", "drawn"]
)
def test_graphs_change_no_token(options: dict[str, Any], folder: Path, replays: list[int]) -> None:
    model = load_model(folder, device="cuda")

    def generated(cuda_graphs: bool | None) -> torch.Tensor:
        torch.manual_seed(5)
        replays.clear()
        return new_tokens(model, cuda_graphs=cuda_graphs, **options)

    plain = generated(False)
    assert not replays
    assert torch.equal(generated(True), plain)
    assert replays == list(range(PROMPT_LEN + 1, PROMPT_LEN + NEW_TOKENS - 1))
    assert torch.equal(generated(None), plain)
    first = PROMPT_LEN + generation._TOKENS_BEFORE_GRAPHS + 1
    assert replays == list(range(first, PROMPT_LEN + NEW_TOKENS - 1))


@pytest.mark.cuda
def test_short_generations_record_nothing(folder: Path, replays: list[int]) -> None:
    new_tokens(load_model(folder, device="cuda"), max_new_tokens=20)
    assert not replays


@pytest.mark.cuda
def test_rows_end_in_the_middle_of_replays(folder: Path, replays: list[int]) -> None:
    model = load_model(folder, device="cuda")
    plain = new_tokens(model, cuda_graphs=False)
    last = generation._TOKENS_BEFORE_GRAPHS + 5
    ends = [int(plain[0, last]), int(plain[1, last])]
    options = {"eos_token_id": ends, "pad_token_id": 7}
    expected = new_tokens(model, cuda_graphs=False, **options)
    assert torch.equal(new_tokens(model, **options), expected)
    assert len(replays) == max(0, expected.size(1) - 2 - generation._TOKENS_BEFORE_GRAPHS)


@pytest.mark.cuda
def test_a_cache_may_grow_between_replays(folder: Path) -> None:
    model = load_model(folder, device="cuda")
    caches = [model.new_cache(Partition.even(0, 1)) for _ in range(2)]
    steps = [DecodeStep.of(model, cache, 2) for cache in caches]
    ids = random_ids(2, 3 * NEW_TOKENS).to("cuda")
    capacities = set()
    for position in range(3 * NEW_TOKENS):
        hidden, expected = (
            decode(model, ids[:, position], cache, step).clone()
            for cache, step in zip(caches, steps, strict=True)
        )
        assert torch.equal(hidden, expected)
        capacities.add(caches[0].capacity)
        if position == 0:
            steps[0].record(required=True)
    assert len(capacities) > 1


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_step_computes_what_the_layers_do(dtype: torch.dtype, folder: Path) -> None:
    model = load_model(folder, device="cuda", dtype=dtype)
    wide = load_model(folder, device="cuda", dtype=torch.float32)
    wide.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    ids = random_ids(2, PROMPT_LEN + 8).to("cuda")
    partition = Partition.even(PROMPT_LEN, 1)
    found = []
    for twin, fused in ((model, True), (model, False), (wide, False)):
        cache = twin.new_cache(partition, new_tokens=8)
        generation.prefill(twin, ids[:, :PROMPT_LEN], (partition,), cache)
        step = DecodeStep.of(twin, cache, 2) if fused else None
        assert (step is not None) == fused
        hidden = [decode(twin, ids[:, PROMPT_LEN + i], cache, step).float() for i in range(8)]
        found.append(torch.stack(hidden))
    step_error, layers_error = ((x - found[2]).pow(2).mean().sqrt() for x in found[:2])
    largest = found[2].abs().max()
    assert step_error <= 1.1 * layers_error + 1e-6 * largest


def hook(*args: object) -> None:
    pass


def generate_and_count(folder: Path, hooked_rank: int | None) -> tuple[torch.Tensor, list[int]]:
    """Tokens of this rank, and the number of graphs of each recording."""
    model = load_model(folder, device=this().device)
    if this().rank == hooked_rank:
        model.base_model.layers[0].register_forward_hook(hook)
    recordings: list[int] = []
    recorded = DecodeStep._recorded

    def counted(self: DecodeStep) -> list[torch.cuda.CUDAGraph]:
        graphs = recorded(self)
        recordings.append(len(graphs))
        return graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeStep, "_recorded", counted)
        tokens = new_tokens(model, partition=Partition.zigzag([9, 14]))
    return tokens, recordings


@pytest.mark.multi_gpu
@pytest.mark.nccl
@pytest.mark.parametrize("hooked_rank", [None, 1])
def test_all_ranks_record_a_token_or_none(
    hooked_rank: int | None, folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    expected = new_tokens(load_model(folder, device="cuda"), cuda_graphs=False)
    found = rank_pool(2, "cuda").run(generate_and_count, folder, hooked_rank)
    for tokens, recordings in found:
        assert torch.equal(tokens, expected)
        assert recordings == ([1] if hooked_rank is None else [])


@pytest.mark.cuda
def test_graphs_under_autocast_are_refused(folder: Path) -> None:
    model = load_model(folder, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with pytest.raises(ValueError, match="cuda_graphs must be False or None under"):
            new_tokens(model, cuda_graphs=True)
        new_tokens(model)  # by its layers


class Waiting(nn.Module):
    """A layer that waits for the device: it cannot be recorded."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert bool(x.isfinite().all())
        return self.layer(x)


@pytest.mark.cuda
@pytest.mark.parametrize("sampled", [False, True])
def test_where_recording_fails_the_model_runs(
    sampled: bool, folder: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of its own parts only, but recording fails all the same."""
    model = load_model(folder, device="cuda")
    options: dict[str, Any] = {"temperature": 0.9} if sampled else {}
    torch.manual_seed(5)
    plain = new_tokens(model, cuda_graphs=False, **options)

    def out_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory for this graph")

    monkeypatch.setattr(DecodeStep, "_recorded", out_of_memory)
    torch.manual_seed(5)
    assert torch.equal(new_tokens(model, **options), plain)
    with pytest.raises(torch.OutOfMemoryError):
        new_tokens(model, cuda_graphs=True)
    assert not replays


def own_forward(model: LLaMA) -> None:
    layer = model.base_model.layers[1].ff_ln
    layer.forward = layer.forward


def other_layer(model: LLaMA) -> None:
    model.base_model.layers[0].attn.qkv = Waiting(model.base_model.layers[0].attn.qkv)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.base_model.layers[0].register_forward_hook(hook),
        lambda model: model.base_model.layers[1].attn.dense.register_forward_pre_hook(hook),
        own_forward,
        other_layer,
    ],
    ids=["hook", "pre-hook", "own forward", "other layer"],
)
def test_a_model_that_a_caller_has_changed_is_not_replayed(
    change: Callable[[LLaMA], object], model: LLaMA
) -> None:
    assert replayable(model.base_model)
    change(model)
    assert not replayable(model.base_model)


def test_nothing_is_replayed_under_hooks_and_dispatch_modes(model: LLaMA) -> None:
    with FlopCounterMode(display=False):
        assert not replayable(model.base_model)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert replayable(model.base_model) != torch.cuda.is_available()
    handle = nn.modules.module.register_module_forward_hook(hook)
    assert not replayable(model.base_model)
    handle.remove()
    assert replayable(model.base_model)


def test_a_cpu_runs_the_layers(model: LLaMA) -> None:
    cache = model.new_cache(Partition.even(PROMPT_LEN, 1))
    assert DecodeStep.of(model, cache, 1, observed=True) is None
    assert torch.equal(new_tokens(model), new_tokens(model, cuda_graphs=False))


def other_norm(model: LLaMA) -> None:
    model.base_model.layers[1].ff_ln = nn.LayerNorm(model.config.emb_dim)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda model: None, None),
        (other_layer, None),  # computes a product, as any layer may
        (other_norm, "a LayerNorm as layers.1.ff_ln"),
        (lambda model: model.double(), "weights of torch.float64"),
    ],
    ids=["as made", "other product", "other norm", "float64"],
)
def test_what_the_step_has_no_kernels_for(
    change: Callable[[LLaMA], object], found: str | None, model: LLaMA
) -> None:
    change(model)
    assert misfit(model.base_model) == found
