"""Count the samples of an MP3 file by the headers of its frames.

libmpg123, which libsndfile decodes with, believes the first frame of a file, or guesses by the first bit rate. Of a
file with changing bit rates and no such frame, or of two files joined, it gives a part.
"""

from __future__ import annotations

from mmap import mmap

# kbit/s by the four bits of a header: (version is 1, layer) -> the row. Index 0 is "free", 15 is forbidden.
_BIT_RATES = {
    (True, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}  # by version bits
MAX_TRIMMED = 2 * 4095 + 1152  # samples: the delay and the padding that the first frame may declare, and a frame


def sample_count(data: bytes | mmap) -> int | None:
    """Return the samples of each channel, before the encoder's delay and padding are taken off.

    None: the frames cannot be counted, because the bit rate is "free".
    """
    position, end = _after_tag(data), len(data)
    samples = 0
    first = True
    while position + 4 <= end:
        frame = _frame(data, position)
        if frame is None:
            position = data.find(b"\xff", position + 1)
            if position < 0:
                break
            continue
        size, frame_samples = frame
        if not size:
            return None
        following = position + size
        in_step = (
            following + 4 > end or _frame(data, following) is not None or data[following : following + 3] == b"TAG"
        )
        if not in_step and first:  # bytes that look like a header
            position += 1
            continue
        if following <= end and not (first and _describes_file(data[position:following])):
            samples += frame_samples
        first = False
        position = following
    return samples


def _after_tag(data: bytes | mmap) -> int:
    """Return where the ID3v2 tag at the beginning ends."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _describes_file(frame: bytes) -> bool:
    """Return whether a frame holds no sound but the number of those that follow."""
    return any(mark in frame[:64] for mark in (b"Xing", b"Info", b"VBRI"))


def _frame(data: bytes | mmap, position: int) -> tuple[int, int] | None:
    """Return bytes (0: unknown) and samples of the frame whose header is at `position`; None if there is no header."""
    if position + 4 > len(data) or data[position] != 0xFF or data[position + 1] & 0xE0 != 0xE0:
        return None
    second, third = data[position + 1], data[position + 2]
    version, layer = second >> 3 & 3, 4 - (second >> 1 & 3)
    rate_index, bit_index = third >> 2 & 3, third >> 4
    if version == 1 or layer == 4 or rate_index == 3 or bit_index == 15:
        return None
    rate, padding = _RATES[version][rate_index], third >> 1 & 1
    samples = 384 if layer == 1 else 1152 if layer == 2 or version == 3 else 576
    bit_rate = _BIT_RATES[version == 3, layer][bit_index] * 1000
    if not bit_rate:
        return 0, samples
    if layer == 1:
        return (12 * bit_rate // rate + padding) * 4, samples
    return samples // 8 * bit_rate // rate + padding, samples
