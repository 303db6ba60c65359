"""Requests and replies of OpenAI's completions and chat API, as far as the engine serves them.

From JSON to questions, and from answers to JSON; no I/O. What the engine cannot do is refused, not
ignored. Form: https://platform.openai.com/docs/api-reference, of completions and of chat. One field
is vLLM's: `cache_salt` keeps the cached prompts of those who know it apart.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from examples.engine.request import Delta, Question
from prefixcache.integrations.transformers import Sampling

TOO_MANY_REQUESTS = 429
DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 4
WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that say nothing about the answer."""


class ApiError(Exception):
    """An error in OpenAI's form, with its HTTP status. retry_after_s: None if no wait helps."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == TOO_MANY_REQUESTS:
            kind = "requests"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation and the head of the answer to come. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """max_tokens: of prompt and answer together. vocabulary: number of token ids. max_choices: of
    a prompt. max_prompts: of a request.
    """

    name: str
    tokenizer: Tokenizer
    max_tokens: int
    vocabulary: int
    max_choices: int = 16
    max_prompts: int = 256
    created: int = field(default_factory=lambda: int(time.time()))

    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "prefixcache",
            "max_model_len": self.max_tokens,
        }


class Fields:
    """The fields of a request, each taken once; what is left at the end is not supported."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._left.pop(name, default)
        is_number_like = isinstance(value, bool) and kind is not bool
        if value is not default and (not isinstance(value, kind) or is_number_like):
            raise ApiError(400, f"{name} has the wrong type", name)
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> Any:
        return _within(name, self.take(name, int, default), low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        return float(_within(name, self.take(name, (int, float), default), low, high))

    def check_empty(self) -> None:
        for name, value in self._left.items():
            if value and name not in WITHOUT_EFFECT:
                raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")


def _within(name: str, value: Any, low: float, high: float) -> Any:
    if value is not None and not low <= value <= high:
        raise ApiError(400, f"{name} is {value}, must be {low} to {high}", name)
    return value


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for. One question a prompt, all with the same number of choices."""

    form: Form
    questions: tuple[Question, ...]
    is_stream: bool
    wants_usage: bool
    """In a stream; else it is always there."""

    @property
    def num_choices(self) -> int:
        """Of all questions together."""
        return sum(question.num_choices for question in self.questions)


class Form:
    """What completions and chat have in common."""

    reply_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._head: dict[str, Any] = {
            "id": self.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model.name,
        }

    # ---- the request

    def parse(self, body: Any) -> Ask:
        """Raises ApiError."""
        fields = Fields(body)
        if (name := fields.take("model", str, self._model.name)) != self._model.name:
            raise ApiError(404, f"there is no model {name!r}", "model", "model_not_found")
        prompts = self.prompts(fields)
        longest = max(map(len, prompts))
        max_tokens = self.max_tokens(fields, self._model.max_tokens - longest)
        if longest + max_tokens > self._model.max_tokens:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens and the answer may have {max_tokens}, together "
                f"they may have {self._model.max_tokens}",
                "max_tokens",
                "context_length_exceeded",
            )
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "num_choices": fields.integer("n", 1, 1, self._model.max_choices),
            "sampling": _sampling(fields),
            "stop": _stops(fields),
            "cache_salt": fields.take("cache_salt", str, ""),
        }
        is_stream = fields.take("stream", bool, False)
        stream_options = Fields(fields.take("stream_options", dict, {}))
        wants_usage = stream_options.take("include_usage", bool, False)
        stream_options.check_empty()
        fields.check_empty()
        questions = tuple(Question(tuple(prompt), **options) for prompt in prompts)
        return Ask(self, questions, is_stream, wants_usage)

    def prompts(self, fields: Fields) -> list[list[int]]:
        raise NotImplementedError

    def max_tokens(self, fields: Fields, num_left: int) -> int:
        """num_left: tokens that there is room for after the prompt."""
        raise NotImplementedError

    # ---- the reply

    def reply(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.reply_object,
            "choices": [self.choice(choice) for choice in choices],
            "usage": usage.body(),
        }

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last one of a stream that is asked for it."""
        return {
            **self._head,
            "object": self.chunk_object,
            "choices": [],
            "usage": usage.body(),
        }

    def _chunk(self, index: int, **parts: Any) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **parts}
        return {**self._head, "object": self.chunk_object, "choices": [choice]}


@dataclass(slots=True)
class Choice:
    """An answer as it grows."""

    index: int
    text: str = ""
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.finish_reason = delta.finish_reason


class Usage:
    """Tokens of all choices; a prompt counts once, whatever number of choices it has."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._num_choices = questions[0].num_choices
        self._prompt = sum(len(question.prompt) for question in questions)
        self._cached = [0] * len(questions)
        self._completion = 0

    def add(self, delta: Delta) -> None:
        self._completion += delta.num_tokens
        self._cached[delta.index // self._num_choices] = delta.num_cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


class Completions(Form):
    """/v1/completions. A prompt is text or token ids; several come in a list."""

    reply_object = chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def prompts(self, fields: Fields) -> list[list[int]]:
        given = fields.take("prompt", (str, list), [])
        is_one = isinstance(given, str) or (given and isinstance(given[0], int))
        prompts = [self._tokens(prompt) for prompt in ([given] if is_one else given)]
        if not prompts or not all(prompts):
            raise ApiError(400, "prompt must have a token at least", "prompt")
        if len(prompts) > self._model.max_prompts:
            problem = f"prompt is {len(prompts)}, must be {self._model.max_prompts} at most"
            raise ApiError(400, problem, "prompt")
        return prompts

    def max_tokens(self, fields: Fields, num_left: int) -> int:
        given = fields.integer("max_tokens", None, 1, self._model.max_tokens)
        return given or max(1, min(DEFAULT_COMPLETION_TOKENS, num_left))

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt)
        valid = range(self._model.vocabulary)
        if isinstance(prompt, list) and all(
            type(token) is int and token in valid for token in prompt
        ):
            return prompt
        raise ApiError(400, "prompt must be text or token ids of the model", "prompt")

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._chunk(delta.index, text=delta.text, finish_reason=delta.finish_reason)


class Chat(Form):
    """/v1/chat/completions, text only."""

    reply_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def prompts(self, fields: Fields) -> list[list[int]]:
        messages = [_message(message) for message in fields.take("messages", list, [])]
        if not messages:
            raise ApiError(400, "messages must have a message at least", "messages")
        try:
            return [self._model.tokenizer.chat(messages)]
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", "messages") from error

    def max_tokens(self, fields: Fields, num_left: int) -> int:
        """`max_tokens` is the older name."""
        older = fields.integer("max_tokens", None, 1, self._model.max_tokens)
        given = fields.integer("max_completion_tokens", None, 1, self._model.max_tokens)
        return given or older or max(1, num_left)

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [self._chunk(index, delta=role) for index in range(num_choices)]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        added = {"content": delta.text} if delta.text else {}
        return self._chunk(delta.index, delta=added, finish_reason=delta.finish_reason)


def _sampling(fields: Fields) -> Sampling:
    """A `top_p` of 0 leaves the most likely token, as a temperature of 0 does."""
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    if seed is None:
        seed = secrets.randbits(63)
    if top_p == 0:
        return Sampling(seed=seed)
    return Sampling(temperature, top_p=top_p, seed=seed)


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop", (str, list), [])
    stops = [given] if isinstance(given, str) else given
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, f"stop must be text, or up to {MAX_STOPS} of them", "stop")
    return tuple(stops)


def _message(message: Any) -> dict[str, str]:
    """Its role and its text; parts of content that are text are joined."""
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        content = message.get("content")
        if isinstance(content, str):
            return {"role": message["role"], "content": content}
        if isinstance(content, list) and all(_is_text(part) for part in content):
            return {"role": message["role"], "content": "".join(part["text"] for part in content)}
    raise ApiError(400, "a message must have a role and a content of text", "messages")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)
