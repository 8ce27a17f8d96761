"""The same grid through kvpress and through kvassay, on the same cores in one go.

    make vs-kvpress      (or: python benchmarks/vs_kvpress.py --peer PATH/TO/kvpress-env/bin/python)

SmolLM2-135M, one 2,048-token context, 64 teacher-forced tokens, the six policies both have, five budgets.
Model load and imports are outside every timing. kvassay's time is all it does: record the context to disk,
compress all arms, replay them; it also replays a dense arm and counts blocks, bytes and traffic.

What may differ: `random` draws other numbers. The others have the same definition; keys come from another
attention kernel and prefill chunking, so that near-ties fall differently in the last bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import kvassay  # sets OMP_WAIT_POLICY before torch
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.record.load import load
from kvassay.record.models import model_dir
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm, grid
from kvassay.replay.closed import Replay, replay_trace
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.haystack import load as haystack
from kvassay.workload.sample import Branch, Sample

POLICIES = ("random", "streaming", "snapkv", "keydiff", "tova", "knorm")
BUDGETS = (0.1, 0.25, 0.5, 0.75, 0.9)
CONTEXT, CONTINUATION = 2048, 64
NO_PROTECTION = Protection(0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="python of an environment with kvpress 0.5.x")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=1, help="repeat both sides in turn, quote medians")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load("smollm2-135m")
    ids = text_ids(loaded.tokenizer)
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            peer = run_peer(Path(folder), options, ids)
            rounds.append((peer, run_ours(Path(folder), loaded, ids)))
    report(rounds)


def text_ids(tokenizer) -> list[int]:
    paragraphs = haystack("test").paragraphs(random.Random(0))
    ids = tokenizer("\n\n".join(paragraphs), add_special_tokens=False).input_ids
    return ids[: CONTEXT + CONTINUATION]


def run_peer(folder: Path, options, ids: list[int]) -> dict:
    job = {
        "model": str(model_dir("smollm2-135m")),
        "context": ids[:CONTEXT],
        "continuation": ids[CONTEXT:],
        "policies": POLICIES,
        "budgets": BUDGETS,
        "threads": options.threads,
    }
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("kvpress_peer.py")
    subprocess.run([options.peer, script, folder / "job.json", folder / "out.json"], check=True)
    return json.loads((folder / "out.json").read_text())


def run_ours(folder: Path, loaded, ids: list[int]) -> dict:
    question, answer = tuple(ids[CONTEXT : CONTEXT + 1]), tuple(ids[CONTEXT + 1 :])
    branch = Branch(question, answer, "", "prose", tuple(range(len(answer))), 1.0)
    sample = Sample("prose", 0, 0, tuple(ids[:CONTEXT]), (branch,), False)
    arms = [
        Arm(make("dense"), None, NO_PROTECTION),
        *grid([make(name) for name in POLICIES], [Budget("keep_tokens", b) for b in BUDGETS], NO_PROTECTION),
    ]
    start = time.perf_counter()
    trace = record_sample(loaded, sample, folder / "trace", RecordOptions(q_tail=64))
    recorded = time.perf_counter()
    rows = replay_trace(loaded, trace, arms, Protocol(free_tokens=0))
    done = time.perf_counter()
    return {
        "record_s": recorded - start,
        "replay_s": done - recorded,
        "nll": {row.arm: row.nll for row in rows},
        "kept": kept(loaded, trace, arms[1:]),
    }


def kept(loaded, trace: Trace, arms: list[Arm]) -> dict[str, list[list[np.ndarray]]]:
    replay = Replay(loaded, trace, arms, Protocol(free_tokens=0))
    out = {}
    for arm in arms:
        lane = replay.compressed(arm).lane
        out[arm.label] = [list(lane.cache.ledger.live(lane.seq, layer)) for layer in lane.layers]
    return out


def report(rounds: list[tuple[dict, dict]]) -> None:
    peer, ours = rounds[-1]
    cells = len(POLICIES) * len(BUDGETS)

    def median(f):
        return float(np.median([f(p, o) for p, o in rounds]))

    versions = f"kvpress {peer['kvpress']} (transformers {peer['transformers']}), kvassay {kvassay.__version__}"
    print(f"{versions}, {cells} cells")
    print(f"{'cell':24s} {'kept alike':>10s} {'NLL kvpress':>12s} {'NLL kvassay':>12s}   (nats/token, lower is better)")
    for label, cell in peer["cells"].items():
        mine = ours["kept"][label]
        same = [
            len(np.intersect1d(a, b)) / len(b)
            for layer, theirs in zip(mine, cell["kept"], strict=True)
            for a, b in zip(layer, theirs, strict=True)
        ]
        print(f"{label:24s} {np.mean(same):10.4f} {cell['nll']:12.4f} {ours['nll'][label]:12.4f}")
    print(f"{'dense':24s} {'':10s} {peer['dense_nll']:12.4f} {ours['nll']['dense']:12.4f}")
    print("kept alike: share of kvpress's kept tokens that kvassay keeps too, mean over layers and KV heads")
    used = median(lambda p, o: p["as_used_s"] / (o["record_s"] + o["replay_s"]))
    shared = median(lambda p, o: p["shared_cells_s"] / o["replay_s"])
    print(
        f"\nwall seconds, {len(rounds)} round(s), last shown: kvpress as used {peer['as_used_s']:.1f}; with one shared "
        f"prefill {peer['shared_prefill_s']:.1f} + {peer['shared_cells_s']:.1f}; kvassay {ours['record_s']:.1f} "
        f"(record) + {ours['replay_s']:.1f} (replay, dense arm included)"
    )
    print(f"kvpress as used / kvassay                        : {used:.1f}x  (higher is better for kvassay)")
    print(f"kvpress cells / kvassay cells, prefill set aside : {shared:.2f}x  (higher is better for kvassay)")
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
