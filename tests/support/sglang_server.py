"""Run a real SGLang server on the CPU for a test, and stop it in any way."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_server import VllmServer, free_port

__all__ = ["Generation", "SglangServer", "StartSglang"]

# Settings of the caller's shell that would change what is being tested.
_FOREIGN_SETTINGS = ("LIFEBOAT_", "SGLANG_", "PYTHONPATH", "PYTHONHASHSEED")


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one request returned.

    Attributes
    ----------
    text
        The generated text.
    prompt_tokens
        Tokens in the prompt.
    cached_tokens
        Prompt tokens that were not computed.
    storage_tokens
        Those of them that came from storage.
    total_s
        Seconds from sending the request to its answer.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    storage_tokens: int
    total_s: float


class SglangServer(VllmServer):
    """One ``sglang.launch_server`` process and its children.

    Started, stopped and watched as a vLLM server is. Variables of the caller that begin with
    ``SGLANG_`` or ``LIFEBOAT_`` are not inherited.

    Parameters
    ----------
    model
        Directory of the model.
    log
        File that receives the server's output (appended).
    python
        Interpreter of the environment that holds SGLang.
    args
        Further command-line arguments.
    env
        Further environment variables.
    start_timeout_s
        Seconds until a server that is not healthy counts as failed.
    overlap
        Whether scheduling overlaps with computing, as it does without a word; only the MLX
        backend's does on a CPU.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        python: str | Path = sys.executable,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
        overlap: bool = False,
    ) -> None:
        super().__init__(
            model, log=log, python=python, args=args, env=env, start_timeout_s=start_timeout_s
        )
        self._port = free_port()
        self._command = [
            str(python), "-m", "sglang.launch_server",
            "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self._port),
            "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
            "--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--skip-server-warmup",
            *([] if overlap else ["--disable-overlap-schedule"]),
            # The stand-ins for compiled copies know this way only.
            "--hicache-io-backend", "direct",
            *args,
        ]  # fmt: skip
        self._env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_FOREIGN_SETTINGS)
        }
        self._env |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", **(env or {})}

    def generate(
        self, prompt: str, *, max_tokens: int = 16, timeout_s: float = 300.0, **body: Any
    ) -> Generation:
        """Generate greedily from a text.

        Parameters
        ----------
        prompt
            Text, sent as it is (no chat template).
        max_tokens
            Tokens to generate at most.
        timeout_s
            Seconds that the server may stay silent.
        **body
            Further fields of the request, such as ``extra_key``.
        """
        begin = time.perf_counter()
        answer = self.post(
            "/generate",
            {
                "text": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens},
                **body,
            },
            timeout_s=timeout_s,
        )
        about = answer["meta_info"]
        return Generation(
            text=answer["text"],
            prompt_tokens=about["prompt_tokens"],
            cached_tokens=about["cached_tokens"],
            storage_tokens=(about.get("cached_tokens_details") or {}).get("storage") or 0,
            total_s=time.perf_counter() - begin,
        )

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 120.0) -> Any:
        """Send a JSON object and return the answer's."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                connection.request(
                    "POST", path, json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                answer = response.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise self._failure(f"{path} failed: {error!r}") from error
        if response.status != 200:
            raise self._failure(f"{path} answered {response.status}: {answer}")
        try:
            return json.loads(answer)
        except ValueError:
            return answer


#: Type of the fixture that starts servers: takes what :class:`SglangServer` takes by keyword.
StartSglang = Callable[..., SglangServer]
