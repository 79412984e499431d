"""3.4 Serving: where `erniekit server` listens, who may ask, and how much it accepts."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import parameter, section


@dataclass(frozen=True)
class ServingParameters:
    """How `erniekit server` listens, and what it accepts."""

    port: int = parameter(
        8188,
        "The TCP port of `erniekit server`. 0 takes one that is free, which the first line tells.",
        minimum=0,
        maximum=65535,
        example=8000,
    )
    host: str = parameter(
        "127.0.0.1",
        "The address of this machine on which `erniekit server` listens. 127.0.0.1 and localhost are reached from this "
        "machine alone; every other one, such as 0.0.0.0 for all, needs a key (`api_key_file`).",
        example="0.0.0.0",
    )
    api_key_file: str = parameter(
        "",
        "A file whose first line is the key that clients of `erniekit server` send. The environment variable "
        "ERNIEKIT_API_KEY holds a key, too. There is no parameter for the key itself, because configurations and "
        "command lines are read by others. Empty asks for no key, which is for loopback addresses only.",
        example="server.key",
    )
    max_num_seqs: int = parameter(
        64,
        "The number of answers that `erniekit server` computes side by side. More of them share each reading of the "
        "weights, and each one gets its tokens later.",
        minimum=1,
        maximum=4096,
        unit="answers",
        example=16,
    )
    max_waiting_requests: int = parameter(
        256,
        "The number of further answers that wait for their turn. Whoever asks beyond that gets the status 429, with "
        "the seconds after which there should be room.",
        minimum=0,
        maximum=1_000_000,
        unit="answers",
        example=0,
    )
    max_body_mb: int = parameter(
        32,
        "The largest body of a request to `erniekit server`; a larger one gets the status 413. Recordings are sent in "
        "bodies.",
        minimum=1,
        maximum=4096,
        unit="MiB",
        example=64,
    )
    served_model_name: str = parameter(
        "",
        "The name under which clients ask for the model. Empty takes the name of its folder.",
        example="my-model",
    )


SECTION = section(ServingParameters, key="serving", title="3.4 Serving", verbs=("server",))
