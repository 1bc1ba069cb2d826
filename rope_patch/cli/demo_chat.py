"""Open a page in your browser that asks a checkpoint the same question with and without a scheme.

    rope-patch demo-chat
    rope-patch demo-chat DIR --scheme rerope:window=1024+logn
    rope-patch demo-chat DIR --scheme yarn:target=auto --max-length 4x --port 8001

Paste a long text, ask a question, and watch three answers: from the patched model, from the plain model, and from the
plain model on truncated text, the last L tokens only. Each answer shows its number of tokens and its time. A checkpoint
without a chat template continues the text. Nothing leaves your machine, and the page needs no network. Ctrl-C ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rope_patch.cli.options import (
    Count,
    FolderWord,
    Name,
    OptionalLength,
    OptionalScheme,
    Positional,
    in_one_process,
    say,
)
from rope_patch.errors import EvaluationError
from rope_patch.serving.listening import check_packages, check_port, listen

if TYPE_CHECKING:
    from rope_patch.serving.demo import Demo


@dataclass(kw_only=True)
class Options:
    checkpoint: Positional[FolderWord] = None  # folder, GGUF file or Hub ID (default: the recipes' small checkpoint)
    scheme: OptionalScheme = None  # scheme (default: the one that the folder records, or rerope:window=L/2+logn)
    max_length: OptionalLength = None  # longest prompt with its answer (default: what the scheme reaches, or 4 L)
    max_tokens: Count = None  # longest answer, unless the page sets it (default: 256, at most L/4)
    dtype: Name = "auto"  # dtype of the weights: auto (the checkpoint's own), float32, bfloat16 or float16
    device: Name = "auto"  # device to run on: auto, cpu, cuda, cuda:1, mps
    host: Name = "localhost"  # host name to listen on
    port: int = 8000  # port to listen on


def main(options: Options) -> None:
    """Serve the page until SIGTERM or Ctrl-C.

    Raises:
        EvaluationError: an option is out of range, the port is taken, or the server does not support the model or the
            scheme.
    """
    in_one_process("demo-chat")
    for name in ("max_length", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise EvaluationError(f"--{name.replace('_', '-')} {value}: at least 1 is allowed")
    check_packages()
    check_port(options.host, options.port)
    demo = load_demo(options)
    say(f"{demo.checkpoint} (L = {demo.trained}) under {demo.scheme} and without, up to {demo.limit} tokens a request")
    say(f"open http://{options.host}:{options.port}/ in your browser; Ctrl-C ends it")
    listen(demo.application(), options.host, options.port)


def load_demo(options: Options) -> Demo:
    """Load the checkpoint once, and build two servers for it: with the scheme and without.

    Raises:
        NoCheckpoint: there is no such checkpoint.
        EvaluationError: the server does not support the model, there is no scheme, or the scheme sums over earlier
            tokens.
        RopePatchError: the scheme does not fit the model; see `patch`.
    """
    from rope_patch import patch, unpatch
    from rope_patch.evaluation.scheme_specs import scheme_at
    from rope_patch.models.find_stacks import read_stack
    from rope_patch.mounting.longest_text import longest_text
    from rope_patch.patching import find_handle
    from rope_patch.saving.loading import default_checkpoint
    from rope_patch.serving.batch import Batch
    from rope_patch.serving.demo import Demo
    from rope_patch.serving.factors import Reaches, sharing_weights
    from rope_patch.serving.sampling import Sampling
    from rope_patch.serving.server import Server
    from rope_patch.serving.start import batch_settings, check_memory, check_paged, load_served

    checkpoint = options.checkpoint or default_checkpoint()
    patched, tokenizer = load_served(checkpoint, options.dtype, options.device)
    plain, carried = sharing_weights(patched), find_handle(patched)
    if carried is not None:
        unpatch(plain)
    stack = read_stack(plain)
    known, table, trained = stack.checkpoint, stack.absolute, stack.checkpoint.max_length
    usual = "hierarchical" if table else f"rerope:window={max(1, trained // 2)}+logn"
    spec = options.scheme or (usual if carried is None else str(carried.scheme))
    scheme = carried and carried.scheme
    if carried is None or options.scheme is not None:
        scheme = scheme_at(spec, options.max_length or 4 * trained, [known])
    if scheme is None:
        raise EvaluationError(f"--scheme {spec}: name a scheme; the page always shows the plain model, too")
    handle = patch(patched, scheme)
    check_paged(handle)
    limit = options.max_length or longest_text(handle, known)
    readable = min(limit, table.capacity) if table else limit  # a table of positions has no rows beyond
    check_memory(patched, limit + readable)
    new_tokens = options.max_tokens or min(256, max(1, trained // 4))

    def server(model: Any, longest: int) -> Server:
        own = find_handle(model)
        step = limit if own and own.scheme.length_dependent else 512  # see docs/how-to/serve.md
        batch = Batch(model, tokenizer, batch_settings(longest, 1, step), Sampling(0.0, 1.0))
        return Server(checkpoint, model, {None: batch}, Reaches(longest), new_tokens)

    return Demo(server(plain, readable), server(patched, limit), trained, spec)
