"""vLLM's real engine on a CPU: workloads recorded through the command, and a server's requests through the plug-in.

The transformers recorder is the oracle for rows and greedy tokens, dense attention recomputed from the trace that for
vLLM's attention output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvassay.record.fetch import fetch
from kvassay.record.load import load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.open import output_errors
from kvassay.trace.events import EventKind
from kvassay.trace.fingerprint import save_recipe
from kvassay.trace.reader import Branch, Trace
from kvassay.trace.verify import verify
from kvassay.workload.registry import build
from kvassay.workload.sample import Branch as Asked
from kvassay.workload.sample import Sample

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

MARGIN = 1e-3
"""Lead of the first choice over the second below which floating point may choose either."""


def run(*arguments: str) -> str:
    """Run Python with these arguments in a process of its own; its standard output."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sys.stderr.write(done.stderr)  # overhead and size, with `pytest -s`
    return done.stdout


def record(out: Path, model: str, *arguments: str) -> Trace:
    fetch(model)
    command = ["-m", "kvassay", "record", model, "--engine", "vllm", "--out", str(out), "--block-size", "32"]
    printed = run(*command, "--tap", "output", "--prefill-chunk", "128", *arguments)
    return Trace.open(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """GQA, full attention: answers given."""
    out = tmp_path_factory.mktemp("full")
    return record(out, "smollm2-135m", "--workload", "kv_short", "--context", "300", "--param", "questions=2")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Sliding windows of 512 and full attention: answers generated, window passed."""
    out = tmp_path_factory.mktemp("hybrid")
    text = ["--workload", "kv_short", "--context", "700", "--param", "questions=2"]
    return record(out, "gemma-3-270m", *text, "--generate", "6")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Reasoning-shaped; two layers, one KV head, and the steps of the context and a part of the answers."""
    out = tmp_path_factory.mktemp("chain")
    text = ["--workload", "chain", "--context", "400", "--param", "questions=2", "--param", "far=128"]
    return record(out, "smollm2-135m", *text, "--generate", "20", "--layers", "3,29", "--kv-heads", "1", "--steps", "9")


@pytest.fixture(params=["full", "hybrid", "chain"])
def trace(request: pytest.FixtureRequest) -> Trace:
    found: Trace = request.getfixturevalue(request.param)
    return found


def by_transformers(trace: Trace, out: Path) -> Trace:
    """The same tokens through the transformers recorder."""
    branches = tuple(
        Asked(
            tuple(branch.token_ids[: branch.question_tokens].tolist()),
            tuple(branch.token_ids[branch.question_tokens :].tolist()),
            "",
            "",
            (0,),
            0.0,
        )
        for branch in trace.branches
    )
    sample = Sample("again", 0, 0, tuple(trace.prefix.token_ids.tolist()), branches, False, {})
    return record_sample(load(trace.header.model.name), sample, out, RecordOptions(q_tail=64, logits_k=8))


def agreed_steps(ours: Branch, theirs: Branch) -> int:
    """Steps up to the first that floating point may decide; every one before it must choose the same."""
    top = theirs.top_two()
    close = (top[:, 0] - top[:, 1] < MARGIN).nonzero()
    until = int(close[0]) if len(close) else theirs.tokens
    assert ours.greedy_ids[:until].tolist() == theirs.greedy_ids[:until].tolist()
    return until


def test_rows_and_greedy_tokens_are_those_of_the_transformers_recorder(trace: Trace, tmp_path: Path) -> None:
    other = by_transformers(trace, tmp_path / "again")
    part = trace.header.subset
    layers = range(len(trace.layout.layers)) if part is None else part.layers
    heads = slice(None) if part is None or part.kv_heads is None else list(part.kv_heads)
    for mine, theirs in zip(trace.segments, other.segments, strict=True):
        for i, layer in enumerate(layers):
            for name in "kv":
                expected = theirs.cache(layer, name)[:, heads]
                error = (mine.cache(i, name) - expected).norm() / expected.norm()
                assert error < 1e-3, f"{mine.name}, layer {layer}, {name}"
    assert sum(agreed_steps(*pair) for pair in zip(trace.branches, other.branches, strict=True)) > 8


def test_attention_from_the_trace_is_vllms_output(trace: Trace) -> None:
    found = output_errors(trace)
    assert len(found) == len(trace.segments) * len(trace.layout.layers)
    assert max(error.error for error in found) < 1e-3


def test_trace_and_block_tables_are_sound(trace: Trace) -> None:
    report = verify(trace.path)
    assert report.ok, report.problems
    assert report.overlays == ("recorded",)
    assert trace.header.versions.vllm is not None
    assert trace.header.attention == "vllm"


def test_questions_share_the_context_through_vllms_prefix_cache(full: Trace) -> None:
    overlay, events = full.overlay()
    hits = [event.value for event in events if event.kind is EventKind.HIT]
    assert hits == [288, 288]  # 9 whole blocks of 32 of 300 tokens
    context, first, second = (request.tables[0] for request in overlay.requests)
    assert len(context) == 10
    assert context[:9] == first[:9] == second[:9]
    assert not set(first[9:]) & set(second[9:])
    freed = {event.request for event in events if event.kind is EventKind.FREE}
    assert "prefix" in freed
    assert full.reblock(16).exists()


def test_windows_let_go_of_blocks_in_their_groups_alone(hybrid: Trace) -> None:
    overlay, _ = hybrid.overlay()
    assert [group.window for group in overlay.groups].count(512) == 5
    for request in overlay.requests:
        for group, table in zip(overlay.groups, request.tables, strict=True):
            passed = (request.tokens - 512) // 32
            assert (0 in table) == (group.window is not None)
            assert 0 not in table[passed + 2 :]


def test_generated_answers_are_the_greedy_continuation(hybrid: Trace) -> None:
    assert hybrid.header.sampling.mode == "greedy"
    for branch in hybrid.branches:
        start = branch.question_tokens
        assert branch.tokens - start <= 6
        assert branch.token_ids[start:].tolist() == branch.greedy_ids[start - 1 : -1].tolist()


def test_limits_keep_layers_heads_and_steps(chain: Trace) -> None:
    part = chain.header.subset
    assert part is not None
    assert (part.layers, part.kv_heads) == ((3, 29), (1,))
    assert [(layer.q_heads, layer.kv.kv_heads) for layer in chain.layout.layers] == [(3, 1), (3, 1)]
    _, events = chain.overlay()
    assert max(event.step for event in events) == 8
    answers = [branch.tokens - branch.question_tokens for branch in chain.branches]
    assert all(0 < count < 20 for count in answers)


SERVER = """
import sys
from vllm import LLM, SamplingParams

def main():
    eager = sys.argv[2] == "eager"
    llm = LLM(model=sys.argv[1], enforce_eager=eager, dtype="float32", block_size=32, max_model_len=512)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    context = [7 + 11 * i % 900 for i in range(100)]
    prompts = [context + [20, 21], [30 + 7 * i % 500 for i in range(40)], context + [40, 41, 42]]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)

if __name__ == "__main__":
    main()
"""
"""With processes=1: scheduler and model in processes of their own, as in a server. Nothing here knows the recorder."""


def serve(tmp_path: Path, mode: str, processes: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    variables = {
        "KVASSAY_VLLM_RECORD": str(tmp_path / "capture"),
        "KVASSAY_VLLM_RECORD_OUTPUT": "1",
        "KVASSAY_VLLM_RECORD_LAYERS": "0,29",
        "KVASSAY_VLLM_RECORD_LOGITS_K": "2",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(script), str(fetch("smollm2-135m")), mode]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_a_servers_requests_become_one_trace_per_context(tmp_path: Path) -> None:
    done = serve(tmp_path, "eager", processes="1")
    assert done.returncode == 0, done.stderr[-3000:]
    printed = run("-m", "kvassay", "trace", "from-vllm", str(tmp_path / "capture"), "--out", str(tmp_path / "traces"))
    shared, alone = (Trace.open(line) for line in printed.splitlines())
    assert (shared.prefix.tokens, [b.tokens for b in shared.branches]) == (100, [2 + 3, 3 + 3])
    assert (alone.prefix.tokens, [b.tokens for b in alone.branches]) == (39, [1 + 3])
    for trace in (shared, alone):
        assert verify(trace.path).ok
        assert max(error.error for error in output_errors(trace)) < 1e-3
        assert trace.header.model.name == "smollm2-135m"
        for branch in trace.branches:
            start = branch.question_tokens
            assert branch.token_ids[start:].tolist() == branch.greedy_ids[start - 1 : -1].tolist()
    overlay, _ = shared.overlay()
    assert overlay.requests[0].tables[0][:3] == overlay.requests[1].tables[0][:3]


def test_a_compiled_engine_does_not_start(tmp_path: Path) -> None:
    done = serve(tmp_path, "compiled", processes="0")
    assert done.returncode != 0
    assert "recording needs enforce_eager=True" in done.stderr + done.stdout
    assert not (tmp_path / "capture").exists()


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma-3-270m"])
def test_a_recipe_recorded_by_transformers_is_reproduced_in_vllm(model: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    fetch(model)
    loaded = load(model)
    sample = build("kv_short", loaded.tokenizer, 700, seed=3, index=1, questions=2)
    save_recipe(record_sample(loaded, sample, tmp_path / "first"), recipe)
    printed = run("-m", "kvassay", "trace", "reproduce", str(recipe), "--engine", "vllm")
    assert printed.splitlines()[-1] == f"{recipe}: reproduced within 0.001"
