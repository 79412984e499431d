"""How answers are written as JSON: those of chat with messages and calls of tools, those of completions as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from erniekit.inference.engine import ChatModel
from erniekit.inference.sampling import TokenLogprobs
from erniekit.serving.answers import Answer, AnswerPiece, token_text
from erniekit.serving.text_pieces import begun_at_end
from erniekit.serving.tool_calls import Call, CallFormat, new_call_id, split_calls


class ChatShape:
    """Chat completions.

    Args:
        calls: how the model writes calls of tools; None: the request offers none.
    """

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: ChatModel, calls: CallFormat | None) -> None:
        self._model, self._calls = model, calls
        self._growing: dict[int, _GrowingCalls] = {}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""
        text, calls = answer.text, list[Call]()
        if self._calls is not None:
            text, calls = split_calls(answer.text, self._calls)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = _chat_logprobs(self._model, answer.tokens, answer.logprobs) if answer.logprobs else None
        finished = "tool_calls" if calls else answer.finished
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finished}

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return what begins a streamed answer."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def pieces(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return what a piece adds to a streamed answer."""
        text, calls = piece.text, list[Call]()
        if self._calls is not None:
            growing = self._growing.setdefault(index, _GrowingCalls(self._calls))
            text, calls = growing.add(piece)
        logprobs = _chat_logprobs(self._model, piece.tokens, piece.logprobs) if piece.logprobs else None
        deltas: list[dict[str, Any]] = [{"content": text}] if text or logprobs else []
        deltas += [{"tool_calls": [{"index": number, **_call(call)}]} for number, call in enumerate(calls)]
        chunks: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if logprobs:
            chunks[0]["logprobs"] = logprobs
        if piece.finished:
            finished = "tool_calls" if calls else piece.finished
            chunks.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": finished})
        return chunks


class _GrowingCalls:
    """The text of a growing answer up to its calls, which are told when it has ended."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._held = ""  # what may belong to calls
        self._said, self._calls = False, False  # whether the text, or the calls, have begun

    def add(self, piece: AnswerPiece) -> tuple[str, list[Call]]:
        """Return the text that may be told, and with the last piece the calls."""
        self._held += piece.text
        if self._form.is_whole and self._said:
            return self._tell(len(self._held)), []
        if piece.finished:
            return split_calls(self._held, self._form)
        if self._calls:
            return "", []
        place = self._held.find(self._form.begins)
        if place >= 0 and not (self._form.is_whole and self._held[:place].strip()):
            self._calls = True
            return self._tell(len(self._held[:place].rstrip())), []
        certain = len(self._held) - begun_at_end(self._held, self._form.begins)
        return self._tell(len(self._held[:certain].rstrip())), []

    def _tell(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._said = self._said or bool(text)
        return text


class CompletionShape:
    """Completions of texts."""

    name, chunk_name, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs = _text_logprobs(self._model, answer.tokens, answer.logprobs, 0) if answer.logprobs else None
        return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finished}

    def first(self, index: int) -> list[dict[str, Any]]:
        return []

    def pieces(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        logprobs = None
        if piece.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = _text_logprobs(self._model, piece.tokens, piece.logprobs, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        if not (piece.text or logprobs or piece.finished):
            return []
        return [{"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finished}]


Shape = ChatShape | CompletionShape


def _call(call: Call) -> dict[str, Any]:
    return {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(model: ChatModel, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {**_token(model, token, own.chosen), "top_logprobs": [_token(model, *each) for each in own.top]}
            for token, own in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


def _token(model: ChatModel, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(model, token)
    whole = None if "\ufffd" in text else list(text.encode())  # of a part of a character the bytes are not known
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": whole}


def _text_logprobs(
    model: ChatModel, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    texts = [token_text(model, token) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [max(own.chosen, -9999.0) for own in logprobs],
        "top_logprobs": [{token_text(model, token): max(each, -9999.0) for token, each in own.top} for own in logprobs],
        "text_offset": [offset + sum(map(len, texts[:number])) for number in range(len(texts))],
    }
