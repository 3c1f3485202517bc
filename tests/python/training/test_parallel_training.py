# SPDX-License-Identifier: Apache-2.0
"""A ring beside data parallelism, adapters, and models of other libraries: gradients are those of
one process."""

import copy
import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _distributed import RankPool, this
from _rings import SPLITS
from _training import (
    assert_near,
    assert_same_gradients,
    gradients_of,
    sum_over_the_ring,
    summed_gradients,
)
from ringattn import Partition
from ringattn.models import LLaMA, LLaMAConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from _transformers import WEIGHTS, model_of, token_ids

SIZE = 13
CONFIG = LLaMAConfig(*(97, 64, 2, 4, 2), hidden_dim=96, max_expected_seq_len=64, tie_heads=True)


# ---- 2 x 2 --------------------------------------------------------------------------------------


def replicas() -> tuple[Any, Any, torch.Tensor, dict[str, torch.Tensor]]:
    """A mesh of two replicas with rings of two; a model on the ring; this replica's ids; the
    gradients of the mean loss of the replicas."""
    mesh = init_device_mesh(this().device.type, (2, 2), mesh_dim_names=("data", "ring"))
    plain = model_of().requires_grad_(True)
    model = ringattn.parallelize(copy.deepcopy(plain), partition=[2, 3], group=mesh["ring"])
    batches = [token_ids(SIZE, seed=seed) for seed in (1, 2)]
    loss = torch.stack([plain(ids, labels=ids).loss for ids in batches]).mean()
    return mesh, model, batches[mesh["data"].get_local_rank()], gradients_of(plain, loss)


def ddp_agrees() -> None:
    _, model, ids, right = replicas()
    trained = DistributedDataParallel(model)
    trained.register_comm_hook(2, sum_over_the_ring)
    for backwards in (1, 1, 2):  # of a step, of the same ids
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*must sum gradients over the ring")
            with trained.no_sync():
                for _ in range(backwards - 1):
                    trained(ids, labels=ids).loss.backward()
            trained(ids, labels=ids).loss.backward()
        given = {name: x.grad / backwards for name, x in model.named_parameters()}
        assert_same_gradients(given, right, 3e-5)
        model.zero_grad()


def fsdp_agrees(dtype: torch.dtype | None = None) -> None:
    """``dtype``: that the inputs of each part are cast to, for which FSDP2 copies containers."""
    _, model, ids, right = replicas()
    everyone = init_device_mesh(this().device.type, (4,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for part in (*model.model.layers, model.model, model):
        fully_shard(part, mesh=everyone, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(2.0)  # the replicas alone
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        given = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
        assert_same_gradients(given, right, 3e-5)
        model.zero_grad()


@pytest.mark.parametrize(
    "kind",
    [(ddp_agrees,), (fsdp_agrees,), (fsdp_agrees, torch.float32)],
    ids=["ddp", "fsdp", "fsdp that casts"],
)
def test_gradients_are_the_mean_of_replicas_and_the_sum_over_their_rings(
    rank_pool: Any, kind: Any
) -> None:
    rank_pool(4).run(*kind)


def ddp_averages() -> None:
    alone = [dist.new_group([rank]) for rank in range(this().world_size)][this().rank]
    ids = token_ids(SIZE)
    for group in (None, alone):  # over the ring; beside it
        model = ringattn.parallelize(model_of().requires_grad_(True))
        trained = DistributedDataParallel(model, process_group=group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(ids, labels=ids).loss.backward()
        said = [
            str(x.message) for x in caught if "must sum gradients over the ring" in str(x.message)
        ]
        assert len(said) == (group is None)
    dist.destroy_process_group(alone)


def test_ddp_that_averages_over_a_ring_is_warned_of(rank_pool: Any) -> None:
    rank_pool(2).run(ddp_averages)


# ---- adapters -----------------------------------------------------------------------------------


def adapters_agree() -> None:
    peft = pytest.importorskip("peft")
    ids = token_ids(SIZE)
    for targets in (["q_proj", "v_proj"], ["lm_head", "down_proj"]):
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        plain = peft.get_peft_model(model_of(), config)
        for ring_first in (True, False):
            model = copy.deepcopy(plain)
            if ring_first:
                model = ringattn.parallelize(model_of(), partition=WEIGHTS[this().world_size])
                model = peft.get_peft_model(model, config)
                model.load_state_dict(plain.state_dict())
            else:
                with pytest.raises(ValueError, match=r"pass model.get_base_model\(\)"):
                    ringattn.parallelize(model)
                base = model.get_base_model()
                ringattn.parallelize(base, partition=WEIGHTS[this().world_size])
            expected, loss = plain(ids, labels=ids).loss, model(ids, labels=ids).loss
            assert_near(loss, expected, 3e-5)
            right = gradients_of(plain, expected)
            loss.backward()
            assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_adapters_of_peft_train_on_the_head_too(rank_pool: Any) -> None:
    pytest.importorskip("peft")
    rank_pool(2).run(adapters_agree)


# ---- weights that drift apart -------------------------------------------------------------------


def trainable(family: str) -> tuple[nn.Module, Any]:
    """A model on the ring, and how a step's loss comes from it."""
    ids, device = torch.arange(SIZE)[None], this().device
    if family == "transformers":
        model: nn.Module = ringattn.parallelize(model_of().requires_grad_(True))
        ids = ids.to(device)
        return model, lambda: model(ids, labels=ids).loss
    if family == "fms":
        from _fms import MODELS, initialized

        model = initialized(MODELS["llama3"]()).requires_grad_(True).train()
        ringattn.parallelize(model)
        return model, lambda: model(ids).square().mean()
    torch.manual_seed(0)
    model = LLaMA(CONFIG, device=device)
    ids, p = ids.to(device), Partition.even(SIZE, this().world_size)
    return model, lambda: model(ids, p).float().square().mean()


def steps(family: str, sums: bool) -> list[str]:
    """The warnings of some steps of a training."""
    model, loss_of = trainable(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            loss_of().backward()
            if sums:
                ringattn.all_reduce_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return [str(x.message) for x in caught if "weights must be the same" in str(x.message)]


@pytest.mark.parametrize("family", ["own", "transformers", "fms"])
def test_ranks_warn_of_weights_that_drift_apart(rank_pool: Any, family: str) -> None:
    if family == "fms":
        pytest.importorskip("fms")
    pool = rank_pool(2)
    assert pool.run(steps, family, True) == [[], []]
    for said in pool.run(steps, family, False):
        assert len(said) == 1 and "ringattn.all_reduce_gradients" in said[0]


def other_seeds() -> list[str]:
    torch.manual_seed(this().rank)
    model = LLaMA(CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.arange(SIZE)[None], Partition.even(SIZE, this().world_size))
    return [str(x.message) for x in caught]


def test_ranks_warn_of_weights_from_other_seeds(rank_pool: Any) -> None:
    for said in rank_pool(2).run(other_seeds):
        assert len(said) == 1 and "set the same seed before weights are made" in said[0]


# ---- own LLaMA ----------------------------------------------------------------------------------


def own_llama_agrees(lengths: list[int], order: list[int] | None) -> None:
    size, rank = this().world_size, this().rank
    torch.manual_seed(0)
    plain = LLaMA(CONFIG, group="single").to(this().device)
    model = LLaMA(CONFIG, device=this().device)
    model.load_state_dict(plain.state_dict())
    total = sum(lengths)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 97, (2, total + 1), generator=generator).to(this().device)
    ids, targets = ids[:, :-1], ids[:, 1:]

    def loss_of(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / own.numel()

    documents = [0, total // 3, total // 3 + 1, total]
    for p, cu_seqlens in (
        (Partition.zigzag(lengths, order), None),
        (Partition.packed(documents, size), documents),
    ):
        right = gradients_of(plain, loss_of(plain(ids, cu_seqlens=cu_seqlens), targets))
        for sharded in (False, True):
            given = p.shard(ids, rank) if sharded else ids
            logits = model(given, p, sharded=sharded, cu_seqlens=cu_seqlens)
            own = p.shard(targets, rank)
            part = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
            (part / targets.numel()).backward()
            assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_the_own_llama_trains(ring: RankPool) -> None:
    for lengths, order in SPLITS[ring.world_size]:
        if sum(lengths) > 0:
            ring.run(own_llama_agrees, lengths, order)


def recomputed_layers_agree() -> None:
    torch.manual_seed(0)
    model = LLaMA(CONFIG)
    p = Partition.zigzag([7, 2])
    ids = torch.arange(9)[None]

    def gradients() -> dict[str, torch.Tensor]:
        model(ids, p).float().square().sum().backward()
        return summed_gradients(model)

    right = gradients()
    for layer in model.base_model.layers:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False
        )
    assert_same_gradients(gradients(), right, 1e-6)


def test_layers_of_the_own_llama_may_be_computed_again(rank_pool: Any) -> None:
    rank_pool(2).run(recomputed_layers_agree)


# ---- FMS ----------------------------------------------------------------------------------------


def fms_agrees(name: str) -> None:
    from _fms import MODELS, initialized

    plain = initialized(MODELS[name]()).requires_grad_(True).train()
    ids = torch.randint(0, 32, (2, SIZE), generator=torch.Generator().manual_seed(4))

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        logits = logits[:, :-1] if logits.size(1) == SIZE else logits
        targets = ids[:, -logits.size(1) :]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for partition in (None, WEIGHTS[this().world_size]):
        model = ringattn.parallelize(copy.deepcopy(plain), partition=partition)
        for options in ({}, {"last_n_tokens": 5}):
            right = gradients_of(plain, loss_of(plain(ids, **options)))
            loss = loss_of(model(ids, **options))
            loss.backward()
            assert_same_gradients(summed_gradients(model), right, 3e-5)
        with pytest.raises(ValueError, match="must be called as a whole where gradients are"):
            model.base_model(ids)
        ringattn.unparallelize(model)
        body = ringattn.parallelize(model.base_model, partition=partition)
        right = gradients_of(plain.base_model, plain.base_model(ids)[0].tanh().sum())
        body(ids)[0].tanh().sum().backward()
        assert_same_gradients(summed_gradients(body), right, 3e-5)


def experts_are_refused() -> None:
    from _fms import MODELS, initialized

    model = ringattn.parallelize(initialized(MODELS["mixtral"]()).requires_grad_(True))
    ids = torch.ones(1, SIZE, dtype=torch.int64)
    with pytest.raises(ValueError, match="FMS has no backward of its experts"):
        model(ids)
    with torch.no_grad():
        assert model(ids).isfinite().all()


def test_experts_of_fms_are_not_trained(rank_pool: Any) -> None:
    pytest.importorskip("fms")
    rank_pool(2).run(experts_are_refused)


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_models_of_fms_train_with_losses_of_ones_own(rank_pool: Any, name: str) -> None:
    pytest.importorskip("fms")
    rank_pool(3).run(fms_agrees, name)
