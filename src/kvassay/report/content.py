"""What a report says, whatever its form: verdicts, findings, state by kind, provenance, and what is not proved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvassay.experiment.folder import RunFolder
from kvassay.experiment.recorded import read_recorded
from kvassay.experiment.results import Results
from kvassay.layout.bytes import bytes_at
from kvassay.measure.checks import NAMES, Finding, Severity
from kvassay.measure.resample import MIN_CLUSTERS
from kvassay.measure.verdict import Check, Verdict, load_judgement
from kvassay.report import words

SEVERITIES: dict[Severity, str] = {
    "invalid": "the numbers are wrong: no verdict follows from them",
    "suspect": "look before believing",
    "note": "explains what might be taken for a fault",
}
NO_GATE = (
    "No gate judged this run, so it has no verdicts. Numbers without a gate declared beforehand are for looking, not "
    "for choosing. To have verdicts, write the thresholds down first (the first command prints an example to change, "
    "kvassay keys gate says what every key means), declare them, and run with them:"
)
NO_GATE_COMMANDS = (
    "kvassay keys gate --example > gate.toml",
    "kvassay gate declare gate.toml",
    "kvassay run experiment.toml --gate gate.toml",
)
AFTERWARDS = "kvassay gate RUN --gate gate.toml --exploratory"
"""Judges a run by a gate written after it, and says so."""
STATES = ("full", "sliding", "latent", "index", "pooled")


def check_line(check: Check) -> list[str]:
    """A threshold as cells: name, threshold, value with interval, outcome, evidence, note."""
    sign = "≥" if check.direction == "at_least" else "≤"
    value = "-" if check.value is None else f"{check.value:.4g}"
    if check.low is not None and check.high is not None:
        value += f" [{check.low:.4g}, {check.high:.4g}]"
    outcome = {True: "passed", False: "failed", None: "not decided"}[check.passed]
    return [
        check.name,
        "-" if check.threshold is None else f"{sign} {check.threshold:.4g}",
        value,
        check.unit,
        outcome if check.decides else f"{outcome} (shown only)",
        check.evidence + (f", {check.hardware}" if check.hardware else ""),
        check.note,
    ]


CHECK_HEADS = ("check", "threshold", "value [interval]", "unit", "outcome", "evidence", "note")


def name_of(verdict: Verdict) -> str:
    """The arm, with the mark of the second comparison."""
    return verdict.arm + (" (approximates)" if verdict.approximate else "")


def findings(results: Results) -> dict[Severity, list[list[str]]]:
    """Findings by severity, the gravest first: check, its meaning, model, trace set, arm and message."""
    found: dict[Severity, list[list[str]]] = {}
    for severity in SEVERITIES:
        lines = [
            [one.name, NAMES.get(one.name, ""), mine.model, mine.label, _whose(one), one.message]
            for mine in results.sets
            for one in mine.findings
            if one.severity == severity
        ]  # fmt: skip
        if lines:
            found[severity] = lines
    return found


def _whose(found: Finding) -> str:
    return found.arm or ", ".join(found.among) or "all"


def states(results: Results) -> list[list[str]]:
    """Bytes of the dense cache by kind of state, one line per model and context length; none without traces."""
    lines = []
    for found in results.sets:
        layout = _layout(results, found.model, found.label)
        if layout is None:
            continue
        parts = asdict(bytes_at(layout, found.length))
        shown = [words.size(parts[kind]) if parts[kind] else "0" for kind in STATES]
        lines.append([found.model, f"{found.length:,}", layout.kv_dtype, *shown])
    return [line for at, line in enumerate(lines) if line not in lines[:at]]


def _layout(results: Results, model: str, label: str) -> Any:
    name = results.first_traces().get((model, label))
    recorded = None if name is None else read_recorded(RunFolder(results.path).traces / name)
    return None if recorded is None else recorded.layout


def provenance(results: Results) -> list[tuple[str, str]]:
    """Where the numbers come from, in pairs; the whole manifest says more."""
    manifest = results.manifest
    commit = manifest.get("commit")
    protocol = ", ".join(f"{key} {value}" for key, value in manifest["protocol"].items())
    lines = [
        *((f"model {model['name']}", _model(model)) for model in manifest["models"]),
        ("machine", words.machine_line(manifest)),
        ("started, finished", f"{manifest['started']}, {manifest['finished']} (UTC)"),
        ("commit of kvassay", "not in a repository" if commit is None else _commit(commit)),
        ("code that computed the cells", f"sha256 {manifest['code_sha256']}" if "code_sha256" in manifest else "-"),
        ("protocol", protocol),
    ]
    found = load_judgement(results.path)
    if found is not None:
        lines.append(("gate", f"{found.gate}, sha256 {found.gate_sha256}"))
        lines.append(("cells judged", f"sha256 {found.cells_sha256}"))
    return lines


def _model(model: Mapping[str, Any]) -> str:
    given = (("weights sha256", "weights_sha256"), ("tokenizer sha256", "tokenizer_sha256"), ("licence", "licence"))
    return "; ".join(f"{name} {model[key]}" for name, key in given if model.get(key)) or "-"


def _commit(commit: Mapping[str, Any]) -> str:
    return f"{commit['commit']}{', with changed files' if commit['changed'] else ''}"


def not_proved(results: Results) -> list[str]:
    """What a reader must not conclude from this run."""
    return list(_limits(results))


def _limits(results: Results) -> Iterator[str]:
    models = list(dict.fromkeys(found.model for found in results.sets))
    lengths = sorted({found.length for found in results.sets})
    yield (
        f"Anything beyond {_plural(models, 'model')}, contexts of {', '.join(f'{n:,}' for n in lengths)} tokens and "
        f"{_plural(list(dict.fromkeys(found.workload for found in results.sets)), 'workload')}: generated texts with "
        "exact answers, not a sample of real use."
    )
    few = [f"{found.model}, {found.label}" for found in results.sets if found.contexts < MIN_CLUSTERS]
    if few:
        yield f"Differences with fewer than {MIN_CLUSTERS} contexts ({'; '.join(few)}): no interval is given there."
    below = words.unjudged(results)
    if below is not None:
        yield f"Here {below}."
    if any(found.query_aware for found in results.sets):
        yield "What happens when the question comes later: where it was visible while compressing, the table says so."
    if results.latency:
        yield "Anything about a GPU: decode was timed on the CPU named, batch 1, with this project's own kernels."
    else:
        yield "Speed: no decode time was measured."
    if results.cost:
        yield "Real times on modelled hardware: a roofline over measured traffic, without launches or communication."
    if any(info.reconstruction for info in results.arms.values()):
        yield f"What the authors' own code does, for arms marked {words.RECONSTRUCTION}: gaps were filled in here."
    yield "That an engine gets the freed blocks: it needs the way of reclaiming named; vLLM has shared tables today."
    yield "Anything about admission, batching or sharing across requests; `kvassay serve-replay` models capacity only."


def _plural(names: Sequence[str], what: str) -> str:
    return f"the {what}{'s' if len(names) > 1 else ''} {', '.join(names)}"
