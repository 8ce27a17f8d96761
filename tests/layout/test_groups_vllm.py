"""`plan_groups` against the planner of the installed vLLM, for every published layout we plan."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from kvassay.cache.vllm.specs import layer_specs
from kvassay.errors import UnsupportedModel
from kvassay.layout.config import from_config
from kvassay.layout.groups import plan_groups
from kvassay.layout.model import Layout
from tests.cache.backends import NEEDS_VLLM
from tests.layout.configs import PUBLISHED
from tests.layout.test_groups import A, B, C, make

pytestmark = NEEDS_VLLM

MADE = {
    "smaller pages get larger blocks": make((A, None), (B, 64)),
    "pages padded": make((A, None), (C, 64), (A, 128)),
    "three full, four sliding": make(*[(A, None)] * 3, *[(A, 64)] * 4),
    "two full, three sliding": make((A, None), (A, 64), (A, None), (A, 64), (A, 64)),
    "all sliding": make((A, 64), (A, 64)),
    "full of two shapes": make((A, None), (C, None)),
}
LAYOUTS = {
    **{name: from_config(config) for name, config in PUBLISHED.items()},
    **MADE,
}


def planned_by_vllm(layout: Layout, block_size: int):
    """vLLM's groups as (layer names, block size, window, bytes of a page, bytes of a block)."""
    core = "vllm.v1.core."
    planner = import_module(core + "kv_cache_utils")
    if not hasattr(planner, "get_kv_cache_groups"):  # moved in 0.33
        planner = import_module(core + "kv_cache_planning")
    layers_outermost = SimpleNamespace(is_block_outermost=False)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layers_outermost),
        speculative_config=None,
        model_config=None,
    )
    specs = layer_specs(layout, block_size)
    groups = planner.get_kv_cache_groups(config, specs)
    widest = max(len(group.layer_names) for group in groups)
    for group in groups:
        spec = group.kv_cache_spec
        names = [name for name in group.layer_names if not name.endswith(".index")]
        if hasattr(spec, "kv_cache_specs"):  # layers of several shapes in one group
            pages = [one.page_size_bytes for one in spec.kv_cache_specs.values()]
            block, page = sum(pages), max(pages)
            window = getattr(next(iter(spec.kv_cache_specs.values())), "sliding_window", None)
        else:
            block, page = widest * spec.page_size_bytes, spec.page_size_bytes
            window = getattr(spec, "sliding_window", None)
        yield names, spec.block_size, window, page, block


def planned_here(layout: Layout, block_size: int):
    for group in plan_groups(layout, block_size):
        names = [str(layer) for layer in group.layers]
        yield names, group.block_size, group.window, group.page_bytes, group.block_bytes


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_vllms(name: str, block_size: int) -> None:
    layout = LAYOUTS[name]
    try:
        expected = list(planned_here(layout, block_size))
    except UnsupportedModel as refusal:
        pytest.skip(f"not planned: {refusal}")
    assert list(planned_by_vllm(layout, block_size)) == expected
