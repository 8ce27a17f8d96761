"""Blocks allocated and freed per second: our manager against vLLM's, on the same script of requests.

    .venv-vllm/bin/python -P benchmarks/pool.py [--rounds 5] [--json FILE]

Two cases (one full group; one full and five sliding ones), each in three parts and all together: requests that
share half of their prompt are admitted, decoded for 64 tokens, and freed. Both managers hash the tokens
themselves and record events. Rounds alternate; the median counts, in processor time. Ours over vLLM's is printed
as a ratio: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path
from statistics import median
from time import process_time

from kvassay.cache.manager import PagedManager
from kvassay.cache.ops import GroupSpec
from kvassay.cache.vllm.api import api
from kvassay.cache.vllm.manager import VllmManager

BLOCK, PROMPT, DECODE, REQUESTS = 16, 2048, 64, 50
CASES = {
    "full": (GroupSpec(0, (0,), (1,), BLOCK),),
    "full + 5 sliding(512)": (
        GroupSpec(0, (0,), (1,), BLOCK),
        *(GroupSpec(i, (i,), (1,), BLOCK, 512) for i in range(1, 6)),
    ),
}
PARTS = ("admit", "decode", "free")
ALL = "all"


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(32_000) for _ in range(PROMPT // 2)]
    return [shared + [rng.randrange(32_000) for _ in range(PROMPT // 2)] for _ in range(REQUESTS)]


def run(manager, tokens: list[list[int]]) -> dict[str, tuple[int, float]]:
    """Per part the blocks handed out or taken back, and the seconds."""
    names = [f"r{i}" for i in range(len(tokens))]
    free = manager.num_blocks - 1
    measured = {}
    for part in PARTS:
        gc.collect()
        start = process_time()
        if part == "admit":
            for name, prompt in zip(names, tokens, strict=True):
                assert manager.admit(name, prompt) is not None
        elif part == "decode":
            for step in range(DECODE):
                for name in names:
                    assert manager.append(name, [step])
        else:
            for name in names:
                manager.free(name)
        seconds = process_time() - start
        now = len(manager.state().free)
        measured[part] = abs(free - now), seconds
        free = now
    measured[ALL] = tuple(map(sum, zip(*measured.values(), strict=True)))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"vLLM {api().version}; {REQUESTS} prompts of {PROMPT} tokens, half shared; median of {args.rounds} rounds")
    tokens, results = prompts(), []
    for case, groups in CASES.items():
        rounds: dict[str, list[dict[str, tuple[int, float]]]] = {"ours": [], "vllm": []}
        for _ in range(args.rounds):
            for name, make in (("ours", PagedManager), ("vllm", VllmManager)):
                rounds[name].append(run(make(groups, 60_000, 1 << 20), tokens))
        for part in (*PARTS, ALL):
            rate = {name: median(one[part][0] / one[part][1] for one in measured) for name, measured in rounds.items()}
            ratio = rate["ours"] / rate["vllm"]
            results.append({"case": case, "part": part, "unit": "blocks/s", **rate, "ratio": ratio})
            print(
                f"{case:24} {part:7} ours {rate['ours']:12,.0f} blocks/s   vLLM {rate['vllm']:12,.0f}   {ratio:5.2f}x"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
