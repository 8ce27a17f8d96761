"""What a vLLM engine is, as far as recording goes: its attention layers, KV cache groups and block tables."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvassay.errors import RecordError
from kvassay.layout.config import from_config
from kvassay.layout.model import Layout
from kvassay.record.vllm.capture import Arrived, CapturedGroup, Head, Tables
from kvassay.record.vllm.limits import Limits
from kvassay.record.vllm.refusals import check_layer, check_layout
from kvassay.record.vllm.subset import chosen_layers, chosen_q_heads


@dataclass(frozen=True)
class Engine:
    """An engine that can be recorded."""

    runner: Any
    """vLLM's model runner."""
    layout: Layout
    """The whole model's layout."""
    modules: dict[int, Any]
    """vLLM's attention layer by layer index."""
    groups: tuple[CapturedGroup, ...]
    """KV cache groups in vLLM's order."""

    @classmethod
    def of(cls, runner: Any) -> Engine:
        """Look at a runner whose model and KV cache are there; `RecordError` if it cannot be recorded."""
        layout = from_config(runner.model_config.hf_config)
        check_layout(layout)
        kind = importlib.import_module("vllm.model_executor.layers.attention").Attention
        found = {layer_index(m.layer_name): m for m in runner.model.modules() if isinstance(m, kind)}
        if missing := [layer.index for layer in layout.layers if layer.index not in found]:
            raise RecordError(f"{layout.model_type}: vLLM has no attention layer for layers {missing}")
        for layer in layout.layers:
            check_layer(layer, layout, found[layer.index])
        return cls(runner, layout, found, tuple(_group(group) for group in runner.kv_cache_config.kv_cache_groups))

    def head(self, limits: Limits) -> Head:
        """The head of a capture within `limits`; `RecordError` for layers or heads that are not there."""
        layers = chosen_layers(self.layout, limits.layers)
        heads = {index: chosen_q_heads(self.layout, index, limits.kv_heads) for index in layers}
        model = self.runner.model_config
        return Head(
            model=str(model.model),
            vllm=str(importlib.import_module("vllm").__version__),
            dtype=str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # `check_engine` has seen it
            num_blocks=self.runner.kv_cache_config.num_blocks,
            prefill_chunk=self.runner.vllm_config.scheduler_config.max_num_batched_tokens,
            groups=self.groups,
            layers=layers,
            kv_heads=limits.kv_heads,
            sinks={i: _sinks(self.modules[i], heads[i]) for i in layers if self.layout.layers[i].sinks},
            q_from=limits.q_from,
            output=limits.output,
            logits_k=min(limits.logits_k, self.layout.vocab_size),
            logits_from=limits.logits_from,
        )

    def group_of(self, layer: int) -> int:
        """The KV cache group that holds what a layer reads and writes."""
        source = self.layout.source(layer).index
        return next(g for g, group in enumerate(self.groups) if source in group.layers)

    def batch(self, scheduled: dict[str, int]) -> list[tuple[str, int]]:
        """The scheduled requests and their token counts, in batch order; known once the runner calls its model."""
        return [(name, scheduled[name]) for name in self.runner.input_batch.req_ids if name in scheduled]


def layer_index(name: str) -> int:
    """`model.layers.7.self_attn.attn` -> 7; `RecordError` if the name holds no number, or more than one."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    if len(numbers) != 1:
        raise RecordError(f"vLLM's layer name '{name}' does not say which layer it is")
    return int(numbers[0])


def arrived(new: Any) -> Arrived:
    """A `NewRequestData` as a record; `RecordError` for a prompt that is not token ids."""
    if new.prompt_token_ids is None or new.mm_features:
        raise RecordError(f"request {new.req_id}: its prompt is not token ids alone; recording takes text")
    sampling = new.sampling_params
    if sampling is None:
        raise RecordError(f"request {new.req_id}: pooling requests generate nothing and are not recorded")
    return Arrived(
        id=new.req_id,
        prompt_ids=tuple(new.prompt_token_ids),
        hit=new.num_computed_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
    )


def block_tables(manager: Any, request: str) -> Tables:
    """A request's block ids per group, as vLLM's KV cache manager has them now."""
    return tuple(tuple(ids) for ids in manager.get_block_ids(request))


def _group(group: Any) -> CapturedGroup:
    spec = group.kv_cache_spec
    return CapturedGroup(
        layers=tuple(sorted(layer_index(name) for name in group.layer_names)),
        block_size=spec.block_size,
        window=getattr(spec, "sliding_window", None),
    )


def _sinks(module: Any, heads: Sequence[int] | None) -> tuple[float, ...]:
    logits = module.impl.sinks.detach().float().cpu().tolist()
    return tuple(logits if heads is None else [logits[head] for head in heads])
