"""One process of the demo: `python -m hicache_tier.demo.worker JOB.json`.

Speaks JSON lines on stdout (`stage`, then one `result` or `error`); whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hicache_tier.errors import HiCacheTierError, InvalidArgumentError

from .job import Job, Phase
from .models import (
    SourceKind,
    import_transformers,
    load_model,
    load_snapshot,
    load_tokenizer,
    quiet,
    save_snapshot,
)
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch

    from .generate import Generation

_PROMPT = "prompt.json"
_LOGITS = "cold-logits.pt"


class Worker:
    """One phase of the demo.

    Parameters
    ----------
    stream : TextIO
        Where to report to.
    """

    def __init__(self, job: Job, stream: TextIO) -> None:
        self.job = job
        self.scratch = Path(job.scratch)
        self.watch = Stopwatch()
        self._stream = stream

    def say(self, event: str, **data: object) -> None:
        """Report one event."""
        self._stream.write(json.dumps({"event": event, **data}) + "\n")
        self._stream.flush()

    def work(self) -> dict[str, Any]:
        """Do the phase and return what it found."""
        self.say("stage", text="importing torch and transformers")
        with self.watch.time("import_seconds"):
            import torch

            transformers = import_transformers()
            transformers.logging.set_verbosity_error()
            device = _device(self.job.options.device)
        phase = self.cold if self.job.phase is Phase.COLD else self.warm
        with torch.inference_mode():
            found = phase(device)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"pid": os.getpid(), "device": str(device), "versions": versions}
        return {**about, **self.watch.seconds, **found}

    def cold(self, device: torch.device) -> dict[str, Any]:
        """Read the prompt without a cache, write on, and keep the prompt's pages."""
        from .bridge import fingerprint, new_cache
        from .generate import generate, warm_up
        from .stages import Shelf

        job = self.job
        self.say("stage", text=f"loading {job.source.name}")
        with self.watch.time("model_load_seconds"):
            model = load_model(job.source, device)
        with self.watch.time("tokenizer_load_seconds"):
            tokenizer = load_tokenizer(job.source)
            prompt = [int(token) for token in tokenizer.encode(job.options.prompt)]
        if job.source.kind is SourceKind.GGUF:
            save_snapshot(model, self.scratch)
        shelf = Shelf.for_model(job, warm_up(model), prompt, device)
        self.say("stage", text=f"reading {len(prompt)} tokens without a cache, writing {self.steps}")
        cache = new_cache(model)
        run = generate(model, prompt, cache, self.steps, started=time.perf_counter())
        self.say("stage", text="keeping the pages of the prompt")
        kept = shelf.keep(cache, prompt)
        stats = shelf.close()
        self._hand_over(prompt, run)
        return {
            "prompt_tokens": len(prompt),
            "text": tokenizer.decode(run.tokens),
            "run": _plain(run),
            "fingerprint": fingerprint(cache, shelf.usable_tokens(prompt)),
            **shelf.description,
            **shelf.watch.seconds,
            **kept,
            "tier": stats,
        }

    def warm(self, device: torch.device) -> dict[str, Any]:
        """Load the prompt's pages, read what is left, write on; then do it again without a cache."""
        from .bridge import fingerprint, new_cache
        from .generate import generate, warm_up
        from .stages import Shelf

        job = self.job
        self.say("stage", text=f"new process: loading {job.source.name}")
        with self.watch.time("model_load_seconds"):
            handed = job.source.kind is SourceKind.GGUF
            model = load_snapshot(self.scratch, device) if handed else load_model(job.source, device)
        prompt = json.loads((self.scratch / _PROMPT).read_text())
        shelf = Shelf.for_model(job, warm_up(model), prompt, device)
        self.say("stage", text="new process: loading pages, reading what is left")
        started = time.perf_counter()
        cache = new_cache(model)
        fetched = shelf.fetch(cache, prompt)
        run = generate(model, prompt, cache, self.steps, started=started)
        kv = fingerprint(cache, shelf.usable_tokens(prompt))
        stats = shelf.close()
        self.say("stage", text=f"new process: reading all {len(prompt)} tokens again, to compare")
        again = generate(model, prompt, new_cache(model), self.steps, started=time.perf_counter())
        return {
            "run": _plain(run),
            "again": _plain(again),
            "fingerprint": kv,
            "logits": self._compare(run, again),
            **shelf.watch.seconds,
            **fetched,
            "tier": stats,
        }

    @property
    def steps(self) -> int:
        """Tokens to write."""
        return self.job.options.max_new_tokens

    def _hand_over(self, prompt: list[int], run: Generation) -> None:
        import torch

        (self.scratch / _PROMPT).write_text(json.dumps(prompt))
        torch.save(run.logits, self.scratch / _LOGITS)

    def _compare(self, run: Generation, again: Generation) -> dict[str, Any]:
        """Compare logits with those of the cold run, step by step."""
        import torch

        cold = torch.load(self.scratch / _LOGITS, weights_only=True)
        best = cold.topk(2).values
        return {
            "argmax_equal": bool((run.logits.argmax(-1) == cold.argmax(-1)).all()),
            "max_difference": float((run.logits - cold).abs().max()),
            "max_difference_without_cache": float((again.logits - cold).abs().max()),
            "smallest_lead_of_the_best": float((best[:, 0] - best[:, 1]).min()),
        }


def _plain(run: Generation) -> dict[str, Any]:
    return {
        "tokens": run.tokens,
        "cached_tokens": run.cached_tokens,
        "first_token_seconds": run.first_token_seconds,
        "decode_seconds": run.decode_seconds,
    }


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgumentError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def main(arguments: list[str]) -> int:
    """Run the job in the file that is named; 0 where it came to a result."""
    job = Job.from_dict(json.loads(Path(arguments[0]).read_text()))
    quiet(job.source)
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(job, stream)
    try:
        worker.say("result", **worker.work())
    except HiCacheTierError as error:
        worker.say("error", kind=error.kind, text=str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
