"""Make the model folder of the speech quickstart: a tiny Qwen2-Audio, with its tokenizer and its processor's files.

    python tools/quickstart/make_listener.py [--output examples/models/tiny-listener] [--check]

The folder holds no weights: `continue_training: false` starts from random ones. A window of its encoder is 3 seconds
and not 30, so that a CPU trains it in minutes; longer recordings are several windows. Each digit is one token; any
other text is covered through bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from generated import write_or_check
from make_speech import DIGITS, RATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 384  # the merges that the words support end before this; the model rounds up to it
WINDOW_SECONDS = 3
MEL_BINS = 80
END, PLACEHOLDER = "<|im_end|>", "<|AUDIO|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END, "<|audio_bos|>", PLACEHOLDER, "<|audio_eos|>")
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' if part['type'] == 'audio' else part['text'] }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
ENCODER = {
    "model_type": "qwen2_audio_encoder",
    "d_model": 128,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "num_mel_bins": MEL_BINS,
    "max_source_positions": WINDOW_SECONDS * 50,
    "activation_function": "gelu",
    "initializer_range": 0.08,
}
DECODER = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
    "feature_size": MEL_BINS,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": WINDOW_SECONDS,
    "n_samples": WINDOW_SECONDS * RATE,
    "nb_max_frames": WINDOW_SECONDS * RATE // 160,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def train_tokenizer() -> Tokenizer:
    """Merge the bytes of the words that the data and the template are made of."""
    words = [*DIGITS, *(f" {digit}" for digit in DIGITS), "system", "user", "assistant", "Transcribe the audio."]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*words, *words], trainer)  # a merge wants a pair that occurs twice
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/models/tiny-listener"))
    parser.add_argument("--check", action="store_true", help="only check that the files are up to date")
    arguments = parser.parse_args()
    tokenizer = train_tokenizer()
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(SPECIAL_TOKENS[0])
    ids = {"bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad}
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_config": ENCODER,
        "text_config": {**DECODER, **ids, "vocab_size": VOCABULARY},
        "audio_token_index": tokenizer.token_to_id(PLACEHOLDER),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen2AudioProcessor",
        "eos_token": END,
        "pad_token": SPECIAL_TOKENS[0],
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (END, SPECIAL_TOKENS[0])],
        "model_input_names": ["input_ids", "attention_mask"],  # Qwen2-Audio takes no token_type_ids
        "model_max_length": DECODER["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    values = {"config": config, "tokenizer_config": tokenizer_config, "preprocessor_config": EXTRACTOR}
    files = {
        arguments.output / f"{name}.json": json.dumps(value, indent=2, sort_keys=True) + "\n"
        for name, value in values.items()
    }
    files[arguments.output / "tokenizer.json"] = tokenizer.to_str(pretty=True) + "\n"
    files[arguments.output / "chat_template.jinja"] = TEMPLATE
    return write_or_check(files, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
