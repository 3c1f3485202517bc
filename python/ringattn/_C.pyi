# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import NoReturn

class RowRange:
    begin: int
    end: int

class Visit:
    source: int
    queries: RowRange
    keys: RowRange
    num_pairs: int

class AttentionTile:
    rows: int
    keys: int
    rows_per_warpgroup: int
    relative_cost: int
    overhead_keys: int
    def __init__(
        self,
        *,
        rows: int,
        keys: int,
        rows_per_warpgroup: int,
        relative_cost: int,
        overhead_keys: int,
    ) -> None: ...

def attention_tiles(device: str, dtype: str, head_dim: int) -> list[AttentionTile]: ...

class RankProfile:
    def __init__(
        self,
        *,
        attention_tflops: float,
        linear_tflops: float,
        max_tokens: int | None,
        overhead_ms: float,
        memory_gbps: float | None,
        link_gbps: float | None,
        link_latency_us: float | None,
        tiles: list[AttentionTile],
    ) -> None: ...

class ModelCost:
    def __init__(self, *, attention_flops: float, linear_flops: float, kv_bytes: int) -> None: ...

class Plan:
    layout: str
    lengths: list[int]
    order: list[int]
    depth: int
    min_depth: int
    rank_ms: list[float]
    ideal_ms: float
    memory_bytes: list[int]

def plan(
    seq_len: int,
    profiles: list[RankProfile],
    cost: ModelCost,
    layout: str | None,
    causal: bool,
    training: bool,
    depth: int | None,
    window: tuple[int, int],
    cu_seqlens: list[int] | None,
) -> Plan: ...
def predict(
    layout: str,
    lengths: list[int],
    order: list[int],
    profiles: list[RankProfile],
    cost: ModelCost,
    causal: bool,
    training: bool,
    depth: int | None,
    window: tuple[int, int],
    cu_seqlens: list[int] | None,
) -> list[float]: ...
def plan_cache(num_tokens: int, profiles: list[RankProfile], cost: ModelCost) -> list[int]: ...

class StepTiming:
    call: int
    source: int
    kind: str
    attention_ms: float
    transfer_ms: float
    wait_ms: float
    flops: float
    backward: bool

def segments(
    layout: str, lengths: list[int], order: list[int], rank: int
) -> list[tuple[int, int]]: ...
def schedule(
    layout: str,
    lengths: list[int],
    order: list[int],
    rank: int,
    causal: bool,
    pieces: list[int] = ...,
    window: tuple[int, int] = ...,
    cu_seqlens: list[int] | None = ...,
    key_layout: str | None = ...,
    key_lengths: list[int] = ...,
    key_order: list[int] = ...,
    key_pieces: list[int] = ...,
) -> list[Visit]: ...
def check_documents(cu_seqlens: list[int], seq_len: int) -> None: ...
def packed_pieces(
    cu_seqlens: list[int],
    world_size: int,
    causal: bool,
    window: tuple[int, int],
    weights: list[float],
) -> list[list[tuple[int, int]]]: ...
def rows_fetched(
    pieces: list[tuple[int, int]], cu_seqlens: list[int], causal: bool, window: tuple[int, int]
) -> int: ...

class GroupWait:
    """A wait of Python's for all other ranks of a group."""

    def __init__(self, group_name: str, operation: str) -> None: ...
    def poll(self) -> None: ...
    def interrupt(self) -> None: ...
    def expired(self) -> bool: ...

def check_group(group_name: str) -> None: ...
def end_group(group_name: str, operation: str, reason: str) -> NoReturn: ...
def fail_group(group_name: str, reason: str) -> None: ...
def begin_replay(group_name: str, device: int) -> None: ...
def end_replay(group_name: str, device: int) -> None: ...
def exchange(group_name: str, mine: bytes, operation: str) -> list[bytes]: ...
def last_transport(group_name: str) -> str | None: ...
def can_record(group_name: str) -> bool: ...
def set_logger(logger: Callable[[bool, str], None] | None) -> None: ...
def refuse_call(group_name: str, message: str) -> None: ...
def synchronize(group_name: str) -> None: ...
def start_recording(by_block: bool) -> None: ...
def stop_recording() -> list[StepTiming]: ...
def set_slowdown(factor: float) -> None: ...
def set_sm_cap(num_sms: int | None) -> None: ...
def build_info() -> dict[str, str | bool | list[str] | None]: ...
def reread_environment() -> None: ...
def inject_transfer_delays(seed: int | None) -> None: ...
def transports() -> list[str]: ...
