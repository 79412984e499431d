"""Expand the placeholder tokens of recordings, and say where those of each clip stand.

A template writes one placeholder for each clip. Once its text is encoded, the placeholder becomes as many as the
encoder makes states of the clip, so that packing and attention see ordinary tokens. A text that a user wrote never has
the token's id (`tokenizers.breaks`), so the placeholders of a sample are those of its clips, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from erniekit.data.conversation import Conversation, Preference
from erniekit.data.formats.format import Record
from erniekit.data.media.clip import AudioInputs, Clip, PlacedClip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording import clip_length
from erniekit.data.templates.ernie import Sample, Template, TemplateRefusedError
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError

MAX_THREADS = 8  # that read the headers of recordings; they wait for the disk
NO_ENCODER = "a recording, but the model of model_name_or_path has no audio encoder"


@dataclass(frozen=True, slots=True)
class Recordings:
    """What is known of the recordings of some records: their lengths, and what the model's encoder takes of them.

    Attributes:
        inputs: None: the model has no audio encoder.
        lengths: of each clip, in samples at the sampling rate of `inputs`.
    """

    inputs: AudioInputs | None = None
    lengths: Mapping[Clip, int] = field(default_factory=dict)

    def expand(self, encoded: Sequence[Sequence[int]], clips: Sequence[Clip]) -> list[Sequence[int]]:
        """Return the ids of segments with each placeholder as often as its clip has states; all else as it is.

        Args:
            encoded: the ids of each segment, with one placeholder for each clip.
            clips: in the order of the placeholders.

        Raises:
            TemplateRefusedError: the template has written more or fewer placeholders than there are clips.
        """
        if self.inputs is None:
            return list(encoded)
        placeholder = self.inputs.placeholder_id
        found = sum(ids.count(placeholder) for ids in encoded)
        if found != len(clips):
            raise TemplateRefusedError(
                f"{len(clips):,} recordings, for which the model's chat template writes {found:,} placeholders"
            )
        if not clips:
            return list(encoded)
        counts = iter([self.inputs.clip_tokens(self.lengths[clip]) for clip in clips])
        return [
            [each for token in ids for each in ([token] * next(counts) if token == placeholder else [token])]
            for ids in encoded
        ]

    def place(self, tokens: Sequence[int], clips: Sequence[Clip]) -> tuple[PlacedClip, ...]:
        """Return where the placeholders of clips stand among tokens; clips behind their end are left out.

        Raises:
            TemplateRefusedError: placeholders are left that belong to none of the clips.
        """
        if self.inputs is None or not clips:
            return ()
        places = [place for place, token in enumerate(tokens) if token == self.inputs.placeholder_id]
        placed: list[PlacedClip] = []
        taken = 0
        for clip in clips:
            count = self.inputs.clip_tokens(self.lengths[clip])
            own = places[taken : taken + count]
            if not own and taken == len(places):
                break
            if len(own) < count or own[-1] - own[0] != count - 1:
                raise TemplateRefusedError("a recording whose placeholders do not stand one after the other")
            placed.append(PlacedClip(clip, own[0], count, self.lengths[clip]))
            taken += count
        if taken != len(places):
            raise TemplateRefusedError("a recording whose placeholder would be read twice")
        return tuple(placed)

    def with_clips(self, sample: Sample, clips: Sequence[Clip]) -> Sample:
        """Return a sample with its clips. Their placeholders are no targets.

        Raises:
            TemplateRefusedError: see `place`; or a recording stands in a trained answer.
        """
        if self.inputs is None or not clips:
            return sample
        if (sample.labels == self.inputs.placeholder_id).any():
            raise TemplateRefusedError("a recording in a trained answer; models read recordings, and answer in text")
        return replace(sample, clips=self.place(sample.input_ids.tolist(), clips))


TEXT_ONLY = Recordings()


def clips_of(record: Record) -> tuple[Clip, ...]:
    """Return the clips of a record in the order in which a sample has them; of a pair, those of its prompt."""
    if isinstance(record, Preference):
        return record.prompt.clips
    return record.clips if isinstance(record, Conversation) else ()


def measure(clips: Iterable[Clip], inputs: AudioInputs) -> dict[Clip, int | RecordingError]:
    """Return the length of each clip in samples, or why its recording cannot be used. Only headers are read.

    Raises:
        DataError: a package is missing.
    """
    different = list(dict.fromkeys(clips))
    if not different:
        return {}

    def length(clip: Clip) -> int | RecordingError:
        try:
            samples = clip_length(clip, inputs.sampling_rate)
        except RecordingError as error:
            return error
        if inputs.clip_tokens(samples):
            return samples
        milliseconds = f"{1000 * samples / inputs.sampling_rate:.1f} ms"
        return RecordingError(clip, "enough sound for a state of the model's encoder", milliseconds)

    with ThreadPoolExecutor(min(MAX_THREADS, len(different)), thread_name_prefix="headers") as pool:
        return dict(zip(different, pool.map(length, different), strict=True))


class EncodedPrompt(NamedTuple):
    """What a model reads before it answers: token ids, and the recordings whose placeholders are among them."""

    ids: list[int]
    clips: tuple[PlacedClip, ...] = ()


def encode_prompt_with_clips(
    template: Template, tokenizer: Tokenizer, conversation: Conversation, inputs: AudioInputs | None
) -> EncodedPrompt:
    """Encode what training has before the answer to the last (user) turn, with the conversation's recordings.

    Args:
        inputs: what the model's encoder takes; None: it has none.

    Raises:
        DataError: a recording cannot be read, or the model has no encoder for it; or the template refuses the dialogue.
    """
    clips = conversation.clips
    if clips and inputs is None:
        raise DataError(f"{clips[0].path}: {NO_ENCODER}")
    lengths: dict[Clip, int] = {}
    for clip, length in measure(clips, inputs).items() if inputs is not None else ():
        if isinstance(length, RecordingError):
            raise length
        lengths[clip] = length
    recordings = Recordings(inputs, lengths)
    segments = template.render(conversation.untrained())
    encoded = recordings.expand(tokenizer.encode_batch([segment.text for segment in segments]), clips)
    ids = [token for part in encoded for token in part]
    return EncodedPrompt(ids, recordings.place(ids, clips))
