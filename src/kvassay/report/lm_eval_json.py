"""A run as lm-evaluation-harness result files, for whatever reads those: one file per model and arm.

The layout is that of the harness's own `results_*.json` (0.4.13, `lm_eval.result_schema.EvalResults`): a trace set is
a task, `metric,filter` keys hold its numbers. The prompts of single questions are not kept in a run folder, so there
are no `samples_*.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import os_errors
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.aggregate import Cell
from kvassay.measure.metrics import CARDS, QUALITY

FILTER = "none"
"""The harness's name for results that no filter went over."""
AMOUNTS = ("retained_fraction", "retained_fraction_scope", "read_fraction")
"""Exported beside quality; bytes are not comparable between models, fractions are."""
FREED = "freed_fraction"
"""Blocks freed / dense's blocks, by reclaim mode."""
DIRECTION = {"higher": True, "lower": False, "none": None}


def write_lm_eval(results: Results, folder: Path) -> list[Path]:
    """Write `MODEL__ARM/results_DATE.json` below `folder`; writing a run twice gives the same files.

    Raises `ExperimentError` if they cannot be written.
    """
    written = []
    stamp = str(results.manifest["finished"]).replace(":", "-")
    for model in dict.fromkeys(found.model for found in results.sets):
        for arm in results.arms.values():
            sets = [found for found in results.sets if found.model == model and found.cell(arm.label)]
            if not sets:
                continue
            file = folder / sanitized(f"{model}__{arm.label}") / f"results_{stamp}.json"
            text = json.dumps(_file(results, model, arm, sets), indent=2, ensure_ascii=False)
            with os_errors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n", encoding="utf-8")
            written.append(file)
    return written


def sanitized(name: str) -> str:
    """A name as the harness makes a folder of it, and without spaces."""
    return re.sub(r"[\"<>:/|\\?*\[\]\s]+", "__", name)


def _file(results: Results, model: str, arm: ArmInfo, sets: list[SetResult]) -> dict[str, Any]:
    manifest = results.manifest
    tasks = {sanitized(found.label): found for found in sets}
    cells = {task: cell for task, found in tasks.items() if (cell := found.cell(arm.label)) is not None}
    name = f"{model}__{arm.label}"
    commit = manifest.get("commit") or {}
    return {
        "results": {task: _numbers(task, tasks[task], cell) for task, cell in cells.items()},
        "group_subtasks": {task: [] for task in tasks},
        "configs": {task: _config(task, found) for task, found in tasks.items()},
        "versions": dict.fromkeys(tasks, str(manifest.get("code_sha256", ""))[:12]),
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {task: dict(_directions(cell)) for task, cell in cells.items()},
        "n-samples": {
            task: {"original": tasks[task].contexts * tasks[task].questions, "effective": cell.samples}
            for task, cell in cells.items()
        },
        "config": _about(manifest, model, arm),
        "git_hash": commit.get("commit"),
        "date": datetime.fromisoformat(manifest["started"]).timestamp(),
        "transformers_version": manifest["machine"].get("transformers"),
        "kvassay_version": manifest["machine"].get("kvassay"),
        "task_hashes": {task: _hash(manifest, found) for task, found in tasks.items()},
        "model_source": "kvassay",
        "model_name": name,
        "model_name_sanitized": sanitized(name),
    }


def _numbers(task: str, found: SetResult, cell: Cell) -> dict[str, Any]:
    """A task's metrics. Standard errors are clustered by context; `N/A`, as the harness writes it, where none is."""
    row: dict[str, Any] = {"name": task, "alias": found.label, "sample_len": cell.samples}
    for name, estimate in cell.quality.items():
        row[f"{name},{FILTER}"] = _finite(estimate.mean)
        row[f"{name}_stderr,{FILTER}"] = "N/A" if estimate.error is None else _finite(estimate.error)
    for name in AMOUNTS:
        row[f"{name},{FILTER}"] = _finite(cell.amounts[name])
    total = cell.amounts["blocks_total"]  # 0 where windows bound every layer
    for mode, freed in cell.blocks_freed.items():
        row[f"{FREED}_{mode},{FILTER}"] = _finite(freed / total) if total else "N/A"
    return row


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _directions(cell: Cell) -> Iterator[tuple[str, bool | None]]:
    yield from ((name, DIRECTION[CARDS[name].better]) for name in (*cell.quality, *AMOUNTS))
    yield from ((f"{FREED}_{mode}", True) for mode in cell.blocks_freed)


def _config(task: str, found: SetResult) -> dict[str, Any]:
    about = {"length": found.length, "contexts": found.contexts, "questions_per_context": found.questions}
    return {
        "task": task,
        "task_alias": found.label,
        "dataset_path": f"kvassay workload {found.workload}",
        "output_type": "generate_until",
        "num_fewshot": 0,
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": DIRECTION[CARDS[name].better]}
            for name in (*QUALITY, *AMOUNTS)
        ],
        "metadata": {**about, "query_aware": found.query_aware},
    }


def _about(manifest: Mapping[str, Any], model: str, arm: ArmInfo) -> dict[str, Any]:
    """The model as `python -m kvassay.lm_eval` would be given it."""
    identity: Mapping[str, Any] = next((one for one in manifest["models"] if one["name"] == model), {})
    policy = arm.label.removesuffix(" own-prefill")
    arguments = {
        "pretrained": model,
        "policy": policy if arm.budget is None else policy.removesuffix(f" {arm.budget}"),
        "budget": arm.budget,
        **manifest["protection"],
        "own_prefill": arm.own_prefill,
    }
    return {
        "model": "kvassay",
        "model_args": arguments,
        "model_sha": identity.get("weights_sha256"),
        "model_revision": identity.get("revision"),
        "batch_size": "1",
        "batch_sizes": [],
        "device": manifest["machine"]["device"],
        "use_cache": None,
        "limit": None,
        "gen_kwargs": {"do_sample": False, "max_gen_toks": manifest["protocol"]["free_tokens"]},
        "random_seed": manifest["protocol"]["seed"],
        "kvassay_reference": arm.reference,
        "kvassay_reconstruction": arm.reconstruction,
    }


def _hash(manifest: Mapping[str, Any], found: SetResult) -> str:
    """Of the traces' names, each of which hashes its sample, its model and how it was recorded."""
    mine = [one for one in manifest["units"] if (one["model"], one["trace_set"]) == (found.model, found.label)]
    return hashlib.sha256(" ".join(one["trace"] for one in mine).encode()).hexdigest()
