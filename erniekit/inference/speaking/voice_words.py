"""The words with which the published OmniVoice models were told about voices and languages; others mean nothing to
them."""

from __future__ import annotations

import difflib
import re

_ENGLISH = (
    ("male", "female"),
    ("child", "teenager", "young adult", "middle-aged", "elderly"),
    ("very low pitch", "low pitch", "moderate pitch", "high pitch", "very high pitch"),
    ("whisper",),
    tuple(
        f"{country} accent"
        for country in (
            "american", "australian", "british", "canadian", "chinese", "indian", "japanese", "korean", "portuguese",
            "russian",
        )
    ),
)  # fmt: skip
_CHINESE = (
    ("男", "女"),
    ("儿童", "少年", "青年", "中年", "老年"),
    ("极低音调", "低音调", "中音调", "高音调", "极高音调"),
    ("耳语",),
    tuple(f"{place}话" for place in "河南 陕西 四川 贵州 云南 桂林 济南 石家庄 甘肃 宁夏 青岛 东北".split()),  # noqa: SIM905
)
KINDS = tuple({*english, *chinese} for english, chinese in zip(_ENGLISH, _CHINESE, strict=True))
WORDS = frozenset().union(*KINDS)


def doubt(instruct: str) -> str:
    """Return why a description of a voice may not be understood by a published model; "" if it will be."""
    words = [word.strip().lower() for word in re.split("[,，]", instruct) if word.strip()]
    for word in words:
        if word not in WORDS:
            near = difflib.get_close_matches(word, sorted(WORDS), n=1, cutoff=0.6)
            hint = (
                f"; did you mean {near[0]}?"
                if near
                else f"; it knows {', '.join(word for kind in _ENGLISH for word in kind)}"
            )
            return f"{word!r:.60} is no word that the model was trained with{hint}"
    for kind in KINDS:
        if len(found := [word for word in words if word in kind]) > 1:
            return f"{' and '.join(found)} contradict each other"
    return ""


def language_doubt(language: str) -> str:
    """Return why a language may not be understood by a published model, which was told codes; "" if it will be."""
    if re.fullmatch("[a-z]{2,3}", language):
        return ""
    return f"{language!r:.60} is no code of a language, such as en or yue, as the model was trained with"
