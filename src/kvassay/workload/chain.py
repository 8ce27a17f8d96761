"""A reasoning-SHAPED workload: a generated derivation with exact intermediate values. No reasoning model wrote it.

Known values and a plan stand early; worked steps follow with prose between them, as in a long scratchpad:

    oak: 889.      attic = oak + 9.      attic = oak + 9. oak: 889. attic: 898.

Every asked step needs what stands more than `far` tokens back: its line of the plan (source and addend) and the
value of its source, which is a known value or the result of an earlier worked step. Only those recalled tokens
are scored. The sum, which follows from a value just written, is not: small models cannot add.

Every variable is used as a source at most once, so a recalled value stands in one place of the context.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.lexicon import WORDS

PLAN_DEPTH = 0.25
LAST_DEPTH = 0.97
SPARE = 2  # known values beyond those that the asked steps may take
MARGIN = 48  # tokens; inserts go to the nearest sentence boundary, so aim this much further back than `far`


@dataclass(frozen=True)
class ChainParams:
    """`worked` steps in the context, `steps` more in each answer, their sources over `far` tokens back."""

    worked: int = 4
    steps: int = 2
    far: int = 512


@dataclass(frozen=True)
class Step:
    """One derivation step: `target` = `source` + `add`, and the value of the source."""

    target: str
    source: str
    add: int
    before: int

    @property
    def after(self) -> int:
        """Value of the target."""
        return self.before + self.add

    @property
    def plan(self) -> str:
        """The line of the plan that announces the step."""
        return f"{self.target} = {self.source} + {self.add}."

    @property
    def recalled(self) -> str:
        """The statement of the source's value, as it stands where that value was first written."""
        return f"{self.source}: {self.before}."

    @property
    def work(self) -> str:
        """The worked step: the plan line again, the recalled value, the new value."""
        return f"{self.plan} {self.recalled} {self.target}: {self.after}."


def draft(job: Job, params: ChainParams) -> Draft:
    """Known values, then the plan, then worked steps; each question asks for the next steps of the plan."""
    asked = job.questions * params.steps
    _check(job, params, asked)
    known, depths = asked + SPARE, _depths(params.worked)
    rng = job.rng()
    names = rng.sample(WORDS, known + params.worked + asked)
    given, middle, targets = names[:known], names[known : known + params.worked], names[known + params.worked :]
    values = {name: rng.randrange(200, 800) for name in given}
    facts = [Insert(f"{name}: {values[name]}.", PLAN_DEPTH * (i + 0.5) / known, "\n") for i, name in enumerate(given)]
    reachable = sum(back > params.far + MARGIN for back in _tokens_back(job, params, asked))
    worked, kept = _work(rng, values, middle, asked, reachable)
    final = [
        Step(target, source, rng.randrange(2, 10), values[source]) for target, source in zip(targets, kept, strict=True)
    ]
    plan = Insert("The plan:\n" + "\n".join(step.plan for step in [*worked, *final]), PLAN_DEPTH, "\n\n")
    done = [Insert(step.work, depth, "\n\n") for step, depth in zip(worked, depths, strict=True)]
    return Draft(
        tuple(_question(final[i : i + params.steps], params.far) for i in range(0, asked, params.steps)),
        (*facts, plan, *done),
        preview="Now go on with the plan: " + ", ".join(step.target for step in final) + ".",
        keys=tuple(names),
        meta={"far": params.far},
    )


def _check(job: Job, params: ChainParams, asked: int) -> None:
    """Refuse parameters that leave nothing to derive, too few words, or no room beyond `far`."""
    if params.steps < 1 or params.worked < 1 or params.far < 0:
        raise WorkloadError(
            f"{job.workload}: worked={params.worked} and steps={params.steps} must be at least 1, far={params.far} >= 0"
        )
    needed = 2 * asked + SPARE + params.worked
    if needed > len(WORDS):
        raise WorkloadError(
            f"{job.workload}: worked={params.worked} and steps={params.steps} need {needed} words, "
            f"there are {len(WORDS)}"
        )
    plan_back = _tokens_back(job, replace(params, worked=params.worked + 1), asked)[0]
    if plan_back <= params.far + MARGIN:
        raise WorkloadError(
            f"{job.workload}: length {job.length} is too short for steps over far={params.far} tokens back: the "
            f"plan would end about {plan_back} tokens before the end, {params.far + MARGIN + 1} are needed"
        )


def _tokens_back(job: Job, params: ChainParams, asked: int) -> list[int]:
    """About how many tokens before the end of the context each worked step ends."""
    encode = job.framing.encode
    step = Step("copper", "copper", 5, 500)
    work = len(encode(f"\n\n{step.work}"))
    fixed = (params.worked + asked) * len(encode(f"\n{step.plan}")) + params.worked * work
    fixed += (asked + SPARE) * len(encode(f"\n{step.recalled}"))
    prose = max(job.length - fixed, 0)
    return [int((1 - depth) * prose) + (params.worked - 1 - i) * work for i, depth in enumerate(_depths(params.worked))]


def _depths(worked: int) -> list[float]:
    """Where the worked steps stand: evenly after the plan."""
    return [PLAN_DEPTH + (LAST_DEPTH - PLAN_DEPTH) * (i + 0.5) / worked for i in range(worked)]


def _work(
    rng: random.Random, values: dict[str, int], targets: list[str], asked: int, reachable: int
) -> tuple[list[Step], list[str]]:
    """Worked steps (filling `values`), and `asked` variables kept unused for the final steps.

    About half of the kept ones are results of worked steps that lie far enough back.
    """
    free = list(values)
    rng.shuffle(free)
    results = set(rng.sample(range(reachable), min(reachable, asked // 2)))
    kept, free = free[: asked - len(results)], free[asked - len(results) :]
    steps = []
    for i, target in enumerate(targets):
        source = free.pop(rng.randrange(len(free)))
        step = Step(target, source, rng.randrange(2, 10), values[source])
        values[target] = step.after
        (kept if i in results else free).append(target)
        steps.append(step)
    rng.shuffle(kept)
    return steps, kept


def _question(group: list[Step], far: int) -> Question:
    """Ask a run of consecutive steps; ranges are characters of the answer."""
    text = f"{group[0].target} ="
    answer = "\n".join(step.work for step in group)[len(text) :]
    recalled: list[tuple[int, int]] = []
    derived: list[tuple[int, int]] = []
    ends: list[int] = []
    start = -len(text)
    for step in group:
        source = start + len(f"{step.target} = ")
        add = source + len(f"{step.source} + ")
        before = start + len(f"{step.plan} {step.source}: ")
        after = start + len(step.work) - len(f"{step.after}.")
        for at, piece in ((source, step.source), (add, str(step.add)), (before, str(step.before))):
            recalled.append((at, at + len(piece)))
        derived.append((after, after + len(str(step.after))))
        ends.append(start + len(step.work))
        start = ends[-1] + 1
    meta = {"targets": [step.target for step in group], "values": [step.after for step in group]}
    return Question(
        text,
        answer,
        group[0].plan,
        unique=False,
        scored_text=tuple(recalled),
        recalls=tuple(text for step in group for text in (step.plan, step.recalled)),
        far=far,
        derived=tuple(derived),
        step_ends=tuple(ends),
        meta=meta,
    )
