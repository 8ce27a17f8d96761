"""The model `kvassay` of lm-evaluation-harness: its `hf` model with a compressed cache.

Tokenisation, chat templates and the order of things are those of the harness's `hf` model, so that numbers compare;
only scoring and generating go through the closed loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from kvassay.errors import ExperimentError, did_you_mean
from kvassay.lm_eval.prompts import Prompt, Prompts, divide
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.card import Prefill
from kvassay.policy.registry import parse
from kvassay.record.load import load
from kvassay.replay.arms import Arm
from kvassay.workload.framing import frame

PASSED_ON = (
    "add_bos_token",
    "prefix_token_id",
    "max_length",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
)
"""Arguments that go to the harness's `hf` model as they are."""
OWN = ("pretrained", "policy", "budget", "sink", "recent", "own_prefill", "short", "question_from", "seed", "dtype")
GREEDY = ("do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks")
"""Generation settings that greedy decoding honours, or that mean nothing to it."""


@register_model("kvassay")
class KvassayLM(HFLM):  # type: ignore[misc]
    """A causal LM whose prompts are compressed under a policy before they are continued."""

    def __init__(
        self,
        pretrained: str,
        policy: str = "dense",
        budget: str | float | None = None,
        *,
        sink: int = 4,
        recent: int = 32,
        own_prefill: bool = False,
        short: str = "refuse",
        question_from: str | None = None,
        seed: int = 0,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **more: Any,
    ) -> None:
        """`--model_args`, beside those in `PASSED_ON`.

        Args:
            pretrained: embedded model, folder or Hugging Face id.
            policy: as in an experiment, e.g. ``snapkv(window=16)`` or ``mine.py:MyPolicy``.
            budget: e.g. ``keep=0.25``; none for policies whose size is a parameter.
            sink: first tokens that are never evicted.
            recent: last tokens of the context that are never evicted.
            own_prefill: prefill with the policy in the loop.
            short: `refuse` a prompt that the budget leaves nothing of, or run it `dense` (counted in the results).
            question_from: text that begins the question: from its last occurrence on the prompt is fed after
                compressing, so that no policy sees it. Without it all of the prompt but its last token is compressed.
            seed: of the policies' random generators.
            dtype: of the weights.
            device: `cpu`, `cuda` or `cuda:N`; see `model_device` in the results.
            batch_size: for the harness's sake; prompts run one at a time.
            max_batch_size: likewise.
            more: those in `PASSED_ON`; `ExperimentError` for any other.
        """
        for key in more:
            if key not in PASSED_ON:
                raise ExperimentError(f"model 'kvassay' has no argument '{key}'{did_you_mean(key, (*OWN, *PASSED_ON))}")
        if short not in ("refuse", "dense"):
            raise ExperimentError(f"short={short} is not one of refuse, dense")
        arm = Arm(
            parse(str(policy)),
            None if budget is None else Budget.parse(str(budget)),
            Protection(sink, recent),
            Prefill.OWN if own_prefill else Prefill.SHARED_DENSE,
        )
        loaded = load(pretrained, device=_device(device), dtype=dtype)
        more.setdefault("max_length", loaded.layout.native_context)
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, backend="causal", **more)
        self.loaded, self.question_from, self.truncated = loaded, question_from, 0
        self.opening = frame(loaded.tokenizer).prefix_ids
        self.prompts = Prompts(loaded, arm, seed=seed, short="dense" if short == "dense" else "refuse")

    # -- what the harness asks for ----------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is greedy; a context is compressed once for all of its
        continuations."""
        grouped: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for at, ((text, _), context, _) in enumerate(requests):
            grouped.setdefault((text, tuple(context)), []).append(at)
        found: dict[int, tuple[float, bool]] = {}
        for (text, context), rows in tqdm(grouped.items(), desc="contexts", disable=disable_tqdm):
            room = max(len(requests[at][2]) for at in rows)
            with self.prompts.asked(self._prompt(text, context, room), room) as asked:
                for at in rows:
                    found[at] = asked.score(requests[at][2])
                    # The harness's cache goes by the texts; a rolling request has none.
                    self.cache_hook.add_partial("loglikelihood", requests[at][0], found[at])
        return [found[at] for at in range(len(requests))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused: a whole text has no prompt that could be compressed before it."""
        raise ExperimentError(
            "perplexity over whole texts (loglikelihood_rolling) has no prompt to compress; choose a task that scores "
            "continuations or generates, or use `kvassay run` with the workload 'prose'"
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy replies, cut at the task's stop sequences; `ExperimentError` where a task wants to sample."""
        replies = []
        for request in tqdm(requests, desc="contexts", disable=disable_tqdm):
            text, settings = request.args
            replies.append(self._reply(text, settings))
            self.cache_hook.add_partial("generate_until", (text, settings), replies[-1])
        return replies

    def get_model_info(self) -> dict[str, Any]:
        """What goes into the results beside `model_args`."""
        identity, arm, tally = self.loaded.identity, self.prompts.arm, self.prompts.tally
        dense = arm.policy.card.name == "dense"
        return {
            "model_num_parameters": self.loaded.model.num_parameters(),
            "model_dtype": str(self.loaded.model.dtype),
            "model_sha": identity.weights_sha256,
            "model_device": str(self.loaded.device),
            "kvassay_arm": arm.label,
            "kvassay_protection": {"sink": arm.protection.sink, "recent": arm.protection.recent},
            "kvassay_reconstruction": arm.policy.card.reconstruction,
            "query_aware": None if dense else self.question_from is None,
            "prompts": tally.prompts,
            "prompts_truncated": self.truncated,
            "prompts_left_dense": 0 if dense else tally.dense_prompts,
            "retained_fraction": 1.0 if dense else tally.retained_fraction,
        }

    # -- how ----------------------------------------------------------------------------------------------------

    def _reply(self, text: str, settings: Mapping[str, Any]) -> str:
        wanted = normalize_gen_kwargs(dict(settings), self.max_gen_toks)
        foreign = sorted(set(wanted) - set(GREEDY))
        if wanted.get("do_sample") or foreign:
            what = "sampling" if wanted.get("do_sample") else ", ".join(foreign)
            raise ExperimentError(
                f"the task's generation settings ask for {what}; arms are compared under greedy decoding"
            )
        stops = handle_stop_sequences(
            wanted["until"], eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        limit = int(wanted["max_gen_toks"])

        def ended(ids: Sequence[int]) -> bool:
            said = self.tok_decode(list(ids), skip_special_tokens=False)
            return ids[-1] == self.eot_token_id or any(stop and stop in said for stop in stops)

        with self.prompts.asked(self._prompt(text, self.tok_encode(text), limit), limit) as asked:
            ids = asked.generate(limit, ended)
        # As `hf` does: text without special tokens, cut at the first stop sequence.
        return str(postprocess_generated_text(self.tok_decode(ids), stops, self.think_end_token))

    def _prompt(self, text: str, ids: Sequence[int], room: int) -> Prompt:
        """The prompt, divided where the question begins, or before its last token."""
        context = len(ids) - 1 if self.question_from is None else self._before_question(text, ids)
        prompt, cut = divide(ids, context, room, self.max_length, self.opening)
        self.truncated += cut
        return prompt

    def _before_question(self, text: str, ids: Sequence[int]) -> int:
        """How many tokens come before the question; a token that reaches into it belongs to it."""
        at = text.rfind(str(self.question_from))
        if at < 0:
            raise ExperimentError(
                f"question_from: {self.question_from!r} is not in the prompt that ends {text[-40:]!r}"
            )
        before = self.tok_encode(text[:at]) if at else []
        pairs = zip(before, ids, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(before), len(ids)))
        return min(same, len(ids) - 1)


def _device(asked: str | None) -> str:
    """The device asked for. `cuda:0` is the harness's default too, and means the CPU where there is no GPU."""
    return "cpu" if asked is None or (asked == "cuda:0" and not torch.cuda.is_available()) else asked
