"""From a sample to tokens, and which of them are the answer: only these count in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like._util.words import a_or_an
from nemo_like.recipes.sample_files import BadSampleError


@dataclass(frozen=True)
class Encoded:
    """One sample as tokens."""

    tokens: list[int]
    counts: list[bool]
    """Flags, one for each token: predicting it counts. The first is never predicted."""
    cut: bool = False
    """The sample was longer than a row."""

    @property
    def inputs(self) -> int:
        """Tokens that the model reads: all but the last."""
        return len(self.tokens) - 1

    @property
    def targets(self) -> int:
        """Tokens that count."""
        return sum(self.counts[1:])


class Encoder:
    """Samples to tokens, with a tokenizer of transformers; `seq_len`: the most tokens that the model reads of one.

    A sample has ``messages`` (the tokenizer's chat template; the assistant's turns count), ``prompt`` and ``completion``
    (the completion counts) or ``text`` (all of it counts).
    """

    def __init__(self, tokenizer: Any, seq_len: int):
        self.tokenizer = tokenizer
        self._seq_len = seq_len
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        self._end: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(self, sample: dict[str, Any]) -> Encoded:
        """The sample's tokens, cut at their end to ``seq_len + 1``.

        Raises:
            BadSampleError: it has none of the three forms, or nothing in it counts.
        """
        if "messages" in sample:
            tokens, counts = self._messages(sample)
        elif "prompt" in sample or "completion" in sample:
            tokens, counts = self._completion(sample)
        elif "text" in sample:
            tokens = self._ids(_string(sample, "text"), special=True)
            tokens += self._end if tokens[-1:] != self._end else []
            counts = [True] * len(tokens)
        else:
            keys = ", ".join(map(repr, sample)) or "nothing"
            raise BadSampleError(f"it has {keys}; it must have messages, or prompt and completion, or text")
        whole = len(tokens)
        tokens, counts = tokens[: self._seq_len + 1], counts[: self._seq_len + 1]
        if not any(counts[1:]):
            raise BadSampleError(
                f"no answer is left within the first {self._seq_len} of its {whole} tokens (--seq-len)"
                if whole > len(tokens)
                else f"it has {whole} token(s), and none to predict"
            )
        return Encoded(tokens, counts, whole > len(tokens))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _completion(self, sample: dict[str, Any]) -> tuple[list[int], list[bool]]:
        # Apart, as generation has them: the prompt's tokens are there before the first one of the answer.
        prompt = self._ids(_string(sample, "prompt"), special=True)
        if self._end and prompt[-1:] == self._end:  # some tokenizers end every text
            prompt = prompt[:-1]
        answer = self._ids(_string(sample, "completion"), special=False) + self._end
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    def _messages(self, sample: dict[str, Any]) -> tuple[list[int], list[bool]]:
        messages = _check_messages(sample["messages"])
        tools = {"tools": sample["tools"]} if sample.get("tools") else {}
        if "{% generation" in self._template or "{%- generation" in self._template:
            return self._marked(messages, tools)
        text, spans = self._render(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        counts, at = [], 0
        for start, end in encoded["offset_mapping"]:
            while at < len(spans) and spans[at][1] <= start:
                at += 1
            counts.append(at < len(spans) and start >= spans[at][0] and end > start)
        return list(encoded["input_ids"]), counts

    def _marked(self, messages: list[dict[str, Any]], tools: dict[str, Any]) -> tuple[list[int], list[bool]]:
        """A conversation whose template marks by itself, with ``{% generation %}``, what the assistant writes."""
        how: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._templated(messages, **how, **tools)
        return list(encoded["input_ids"]), list(map(bool, encoded["assistant_masks"]))

    def _render(self, messages: list[dict[str, Any]], tools: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and where in it the assistant's answers are."""

        def render(up_to: int, prompt: bool = False) -> str:
            if not up_to:  # templates refuse an empty conversation
                return ""
            return str(self._templated(messages[:up_to], tokenize=False, add_generation_prompt=prompt, **tools))

        text = render(len(messages))
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = render(index, prompt=True), render(index + 1)
                if not (after.startswith(before) and text.startswith(after)):
                    raise BadSampleError(
                        f"the chat template writes what is before message {index + 1} otherwise when more "
                        "follows, so the answer cannot be told from it. Cut the conversation after each answer"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def _templated(self, messages: list[dict[str, Any]], **how: Any) -> Any:
        """`messages` through the tokenizer's chat template."""
        try:
            return self.tokenizer.apply_chat_template(messages, **how)
        except Exception as error:  # a template is a program: it raises what it likes
            raise BadSampleError(f"the chat template refuses it: {' '.join(str(error).split())}") from error


def load_tokenizer(folder: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder.

    Raises:
        ValueError: there is none that can be read, or it cannot tell where in the text a token is.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each kind of tokenizer has errors of its own
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"No tokenizer can be read from {folder!r}: {reason}. Give its folder with --tokenizer."
        ) from error
    return tokenizer


def check_vocabulary(tokenizer: Any, vocab_size: int | None, model: str) -> None:
    """Raise ValueError where the tokenizer has tokens that the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"The tokenizer has tokens up to number {largest}, and {model!r} has embeddings for {vocab_size}: they do not "
            "belong together. Give the model's own tokenizer with --tokenizer."
        )


def check_form(encoder: Encoder, sample: dict[str, Any]) -> None:
    """Raise ValueError where samples of this form cannot be encoded at all."""
    tokenizer = encoder.tokenizer
    if "messages" not in sample:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "The data has messages, and the tokenizer has no chat template. Give the folder of one that has it with "
            "--tokenizer, or write prompt and completion."
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"The data has messages, and {a_or_an(tokenizer)} cannot tell where in the text its tokens are, so "
            "answers cannot be told apart. Write prompt and completion, or use a fast tokenizer (tokenizer.json)."
        )


def _string(sample: dict[str, Any], key: str) -> str:
    value = sample.get(key)
    if not isinstance(value, str):
        raise BadSampleError(f"{key!r} is {_short(value)}; it must be a string")
    return value


def _check_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadSampleError(f"'messages' is {_short(messages)}; it must be a list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadSampleError(f"message {number} is {_short(message)}; it must have role and content")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise BadSampleError(f"message {number}: content is {_short(message.get('content'))}; it must be a string")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadSampleError("no message is the assistant's, so there is nothing to learn")
    return list(messages)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
