"""A draft of the implementation issue for each promoted arm: evidence, what the engine needs, limits, commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jinja2

from kvassay.errors import GateError
from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import GATE, os_errors
from kvassay.experiment.results import Results
from kvassay.gate.session import EXPLORED
from kvassay.measure.verdict import Check, Judgement, Verdict
from kvassay.policy.needs import TABLES, engine_needs

TEMPLATE = "issue.md.j2"
_LAYERS = ("full", "sliding", "latent", "pooled", "index")


def write_issues(results: Results, judgement: Judgement, folder: Path) -> list[Path]:
    """Write one Markdown file per promoted arm into `folder`, which is made if need be; their paths.

    Raises `ExperimentError` if the folder cannot be written.
    """
    promoted = [verdict for verdict in judgement.overall if verdict.outcome == "promote"]
    paths = []
    with os_errors(folder):
        for verdict in promoted:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', verdict.arm).strip('-')}.md"
            path.write_text(draft(results, judgement, verdict), encoding="utf-8")
            paths.append(path)
    return paths


def draft(results: Results, judgement: Judgement, verdict: Verdict) -> str:
    """The issue's text."""
    if verdict.outcome != "promote":
        raise GateError(f"'{verdict.arm}' was not promoted: {verdict.line}")
    info, parts = results.arms[verdict.arm], [part for part in judgement.of(verdict.arm) if not part.overall]
    machine = results.manifest["machine"]
    return _environment().get_template(TEMPLATE).render(
        arm=verdict.arm,
        summary=f"{info.summary[:1].upper()}{info.summary[1:]}.",
        source=info.source,
        exploratory=judgement.exploratory,
        warning=judgement.warning,
        gate=judgement.gate,
        sha256=judgement.gate_sha256,
        declared=judgement.declared,
        verdict=verdict,
        parts=parts,
        needs=engine_needs(info, reclaimed(parts)),
        elsewhere=elsewhere(info, parts),
        limits=limits(info, judgement, parts),
        version=machine["kvassay"],
        commit=(results.manifest["commit"] or {}).get("commit"),
        run=results.path.name,
        gate_file=EXPLORED if judgement.exploratory else GATE,
        machine=f"Recorded and replayed on {machine['device'] if machine['device'] != 'cpu' else machine['cpu']}.",
    )  # fmt: skip


def reclaimed(parts: Sequence[Verdict]) -> tuple[str, ...]:
    """Ways of reclaiming by which the arm really passed, as its checks say."""
    notes = {check.note for part in parts for check in part.checks if check.name.startswith("freed") and check.passed}
    return tuple(mode for mode in TABLES if f"by {mode}" in notes)


def elsewhere(info: ArmInfo, parts: Sequence[Verdict]) -> list[str]:
    """Where the method is not to be used, or was not looked at."""
    other = [kind for kind in _LAYERS if kind not in info.acts_on]
    lines = [f"{', '.join(other)} state: the method leaves it alone"] if info.acts_on and other else []
    lines.append("models and lengths outside the scope above; recurrent, linear or convolutional state")
    tested = ", ".join(dict.fromkeys(part.workload for part in parts))
    lines.append(f"work of another kind than {tested}")
    if "evict" in info.effects:
        lines.append("blocks shared with another request: dropping them from one table frees nothing")
    return lines


def limits(info: ArmInfo, judgement: Judgement, parts: Sequence[Verdict]) -> list[str]:
    """What a reader must hold against the evidence."""
    lines = [f"filled in by us: {gap}" for gap in info.gaps]
    lines += [f"departs from its source: {deviation}" for deviation in info.deviations]
    if not info.exact:
        lines.append(f"approximates {', '.join(info.approximates)}; compared with its like")
    modelled = dict.fromkeys(
        f"{check.name} is modelled for {check.hardware}: {check.note}"
        for part in parts
        for check in part.checks
        if check.evidence == "modelled"
    )
    return [*lines, *modelled, *judgement.notes] or ["none beyond the scope above"]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # Markdown, not HTML
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "interval": _interval, "asked": _asked, "passed": _passed}
    return environment


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(check: Check) -> str:
    return "-" if check.low is None or check.high is None else f"{check.low:.4g} to {check.high:.4g}"


def _asked(check: Check) -> str:
    return "-" if check.threshold is None else f"{check.direction.replace('_', ' ')} {check.threshold:g}"


def _passed(check: Check) -> str:
    return {True: "yes", False: "no", None: "not decided"}[check.passed] + ("" if check.decides else ", not needed")
