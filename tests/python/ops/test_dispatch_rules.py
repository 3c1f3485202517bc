# SPDX-License-Identifier: Apache-2.0
"""The table of csrc/ops/dispatch_rules.cpp: each operator has a rule, and its kernels follow it."""

import re
from typing import Any

import pytest
import ringattn  # noqa: F401  defines the operators
import torch
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = sorted(
    name.removeprefix("ringattn::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("ringattn::")
)
TENSOR = torch.zeros(1, 2, 2, 8)
VALUES = {"float": 1.0, "int": 1, "bool": True, "str": "", "List[int]": [2]}
CASTING = [name for name in OPERATORS if re.search(r"attention_?$", name)]
CAST = {name: ["q", "k", "v"] for name in CASTING} | {
    "ring_forward": ["q", "k", "v"],
    "rotate_kv": ["kv"],
}


def overload(name: str) -> Any:
    return getattr(torch.ops.ringattn, name).default


def arguments(name: str, **given: torch.Tensor) -> list[Any]:
    """Of the right types for the operator, so that its dispatch rules see them; no more."""
    values = VALUES | {"Tensor": TENSOR}
    return [
        given.get(argument.name, values.get(str(argument.type)))  # of an optional one: None
        for argument in overload(name)._schema.arguments
    ]


def test_the_operators_are_those_of_the_package() -> None:
    assert len(OPERATORS) == 14 and "ring_forward" in OPERATORS


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("key", ["Autograd", "AutocastCPU", "AutocastCUDA", "FuncTorchBatched"])
def test_every_operator_has_a_rule(name: str, key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ringattn::{name}", key)


TENSORS = [
    (name, argument.name)
    for name in OPERATORS
    for argument in overload(name)._schema.arguments
    if "Tensor" in str(argument.type)
]


#: With a backward, which test_gradients.py is about.
DIFFERENTIABLE = ("block_attention", "ring_forward")


@pytest.mark.parametrize(
    ("name", "tensor"), [pair for pair in TENSORS if pair[0] not in DIFFERENTIABLE]
)
def test_a_gradient_of_any_tensor_is_refused(name: str, tensor: str) -> None:
    differentiable = TENSOR.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"ringattn: {tensor} must not require grad"):
        overload(name)(*arguments(name, **{tensor: differentiable}))


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_a_tangent_of_any_tensor_is_refused(name: str, tensor: str) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(TENSOR, TENSOR)
        with pytest.raises(RuntimeError, match=f"ringattn: {tensor} must have no tangent"):
            overload(name)(*arguments(name, **{tensor: dual}))


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_a_batch_of_any_tensor_is_refused(name: str, tensor: str) -> None:
    batched = torch.zeros(3, *TENSOR.shape)
    with pytest.raises(RuntimeError, match=rf"ringattn: {tensor} must not be batched by torch\."):
        torch.vmap(lambda x: overload(name)(*arguments(name, **{tensor: x})))(batched)


class Reached(Exception):
    """The operator has passed its dispatch rules, with these arguments."""


class StopBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ringattn":
            raise Reached(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_casts_the_inputs_of_the_rule_alone(name: str) -> None:
    every = {tensor: torch.zeros(2) for operator, tensor in TENSORS if operator == name}
    with (
        torch.autocast("cpu", torch.bfloat16),
        StopBelow(),
        pytest.raises(Reached) as reached,
    ):
        overload(name)(*arguments(name, **every))
    (args,) = reached.value.args
    named = zip(overload(name)._schema.arguments, args, strict=False)
    cast = [
        argument.name
        for argument, value in named
        if getattr(value, "dtype", None) == torch.bfloat16
    ]
    assert cast == CAST.get(name, [])
