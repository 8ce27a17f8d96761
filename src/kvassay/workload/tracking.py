"""Variable tracking: facts lie scattered in the prose; the answer follows a chain of them to a number.

"Anna lives with Hugo." ... "Hugo lives at number 4821." Every fact stands once. The answer names each link in
order, so each scored token needs one look-up far back, and under teacher forcing a wrong link does not spoil
the next. Longer chains are harder for small models: a middle name stands in two facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.lexicon import NAMES
from kvassay.workload.needle import depths, numbers


@dataclass(frozen=True)
class TrackingParams:
    """`chains` chains of `links` links between names, each ending in a number of `digits` digits."""

    chains: int = 4
    links: int = 1
    digits: int = 4


def draft(job: Job, params: TrackingParams) -> Draft:
    """Scatter all facts of all chains in random order; ask for whole chains."""
    size = params.links + 1
    if params.links < 1 or not job.questions <= params.chains <= len(NAMES) // size:
        raise WorkloadError(
            f"{job.workload}: links={params.links} must be at least 1 and chains={params.chains} between "
            f"questions={job.questions} and {len(NAMES) // max(size, 1)}"
        )
    rng = job.rng()
    drawn = rng.sample(NAMES, params.chains * size)
    chains = [drawn[i * size : (i + 1) * size] for i in range(params.chains)]
    homes = numbers(rng, params.chains, params.digits)
    facts = [fact for chain, home in zip(chains, homes, strict=True) for fact in _facts(chain, home)]
    rng.shuffle(facts)
    inserts = tuple(Insert(fact, depth) for fact, depth in zip(facts, depths(rng, len(facts)), strict=True))
    asked = sorted(rng.sample(range(params.chains), job.questions))
    listed = ", ".join(chains[i][0] for i in asked)
    return Draft(
        tuple(_question(chains[i], homes[i]) for i in asked),
        inserts,
        preview=f"Now say with whom and where these live: {listed}.",
        keys=tuple(drawn),
    )


def _facts(chain: list[str], home: str) -> list[str]:
    """Each link of a chain as a sentence, the number last."""
    links = [f"{a} lives with {b}." for a, b in pairwise(chain)]
    return [*links, f"{chain[-1]} lives at number {home}."]


def _question(chain: list[str], home: str) -> Question:
    """Ask a whole chain; the names that are looked up and the number count."""
    text = f"{chain[0]} lives with"
    answer = " ".join(_facts(chain, home))[len(text) :].removesuffix(".")
    ranges, at = [], 0
    for word in [*chain[1:], home]:
        at = answer.index(word, at)
        ranges.append((at, at + len(word)))
        # The name comes again as the subject of the next fact, where it needs no look-up: step over it.
        at = answer.find(word, at + len(word)) + len(word)
    return Question(
        text,
        answer,
        f"{text} {chain[1]}.",
        unique=False,
        scored_text=tuple(ranges),
        meta={"chain": chain, "number": home},
    )
