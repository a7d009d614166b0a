"""Generation with a paged KV cache and continuous batching; every token equals one without a cache.

A small decoder (bytes in, bytes out, untrained: random weights of a fixed seed) continues prompts
of different lengths. Requests join and leave a running batch: each step is one packed call in which
some sequences read the next chunk of their prompt and others one new token, over pages that are
taken from a pool when a sequence grows and go back when it ends. Afterwards every request is
generated again without any cache, the whole text at each token, and the tokens are compared; a
difference ends the program with exit status 1.

    python examples/generate.py
    python examples/generate.py --device cuda --requests 32 --new-tokens 200 --page-size 64
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_ext

NUM_LAYERS, NUM_HEADS, NUM_HEADS_K, HEAD_DIM = 4, 8, 2, 64
WIDTH, VOCABULARY = NUM_HEADS * HEAD_DIM, 256
LONGEST = 4096  # positions of the rotary tables


# ---- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and MLP over packed hidden states (total, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (NUM_HEADS + 2 * NUM_HEADS_K) * HEAD_DIM, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor, attend) -> Tensor:
        heads = self.qkv(self.norm_attention(hidden)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([NUM_HEADS, NUM_HEADS_K, NUM_HEADS_K], dim=1)
        hidden = hidden + self.project(attend(q, k, v).flatten(1).to(hidden.dtype))
        return hidden + self.down(F.silu(self.up(self.norm_mlp(hidden))))


class Decoder(nn.Module):
    """Bytes (total,) to logits (total, 256); `attend_of(layer)` says how a layer attends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, attend_of) -> Tensor:
        hidden = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, attend_of(layer))
        return self.head(self.norm(hidden))


def rotary_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (LONGEST, HEAD_DIM / 2)."""
    rates = 10000.0 ** (-torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2))
    angles = torch.arange(LONGEST, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


# ---- with a cache --------------------------------------------------------------------------------


@dataclass
class Request:
    """A prompt, what came after it, and the pages that hold its keys."""

    prompt: list[int]
    new_tokens: int
    generated: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys are in the pages

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def is_done(self) -> bool:
        return len(self.generated) == self.new_tokens


class PagedCache:
    """K and V of every layer in pages (num_pages, page_size, NUM_HEADS_K, HEAD_DIM), and a pool."""

    def __init__(self, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype):
        shape = (NUM_LAYERS, num_pages, page_size, NUM_HEADS_K, HEAD_DIM)
        self.k, self.v = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self.page_size, self.free = page_size, list(range(num_pages))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def grow(self, request: Request, tokens: int) -> bool:
        """Pages for `tokens` keys; False, and none taken, when the pool has too few."""
        missing = self.pages_for(tokens) - len(request.pages)
        if missing > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(max(missing, 0))]
        return True

    def release(self, request: Request) -> None:
        self.free += request.pages
        request.pages = []


class Engine:
    """Continuous batching: what runs, what waits, and one packed call a step."""

    def __init__(self, model: Decoder, cache: PagedCache, chunk: int, most: int):
        self.model, self.cache, self.chunk, self.most = model, cache, chunk, most
        self.device = cache.k.device
        self.cos, self.sin = rotary_tables(self.device)
        self.running: list[Request] = []

    def admit(self, waiting: list[Request]) -> None:
        """Joins as many as may run and as the pool can hold to their last token."""
        reserved = sum(
            self.cache.pages_for(len(r.prompt) + r.new_tokens) - len(r.pages) for r in self.running
        )
        while waiting and len(self.running) < self.most:
            need = self.cache.pages_for(len(waiting[0].prompt) + waiting[0].new_tokens)
            if need + reserved > len(self.cache.free):
                return
            reserved += need
            self.running.append(waiting.pop(0))

    def step(self) -> list[Request]:
        """One call for everything that runs; returns the requests that it finished."""
        rows = [r.tokens[r.cached : r.cached + self.chunk] for r in self.running]
        for request, new in zip(self.running, rows, strict=True):
            assert self.cache.grow(request, request.cached + len(new)), "admit() reserved the pages"
        logits = self.model(
            self.int32([token for new in rows for token in new]), self.attention(rows)
        )
        ends = torch.tensor([len(new) for new in rows], device=self.device).cumsum(0) - 1
        best = logits[ends].argmax(-1).tolist()
        for request, new, token in zip(self.running, rows, best, strict=True):
            request.cached += len(new)
            if request.cached == len(request.tokens):  # else more of the prompt is to come
                request.generated.append(token)
        done = [request for request in self.running if request.is_done]
        self.running = [request for request in self.running if not request.is_done]
        for request in done:
            self.cache.release(request)
        return done

    def attention(self, rows: list[list[int]]):
        """How a layer attends in this step: append the new keys, then read the pages."""
        used = self.int32([r.cached for r in self.running])
        starts = self.int32([0, *(len(new) for new in rows)]).cumsum(0, dtype=torch.int32)
        widest = max(len(r.pages) for r in self.running)
        table = self.int32([r.pages + [-1] * (widest - len(r.pages)) for r in self.running])
        longest = max(map(len, rows))

        def attend_of(layer: int):
            k_pages, v_pages = self.cache.k[layer], self.cache.v[layer]

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (x.to(k_pages.dtype) for x in (q, k, v))
                q = flash_ext.apply_rotary_emb(
                    q, self.cos, self.sin, seqlen_offsets=used, cu_seqlens=starts
                )
                seqused_k = torch.ops.flash.cache_append(
                    *(k_pages, v_pages, k, v, used, table, starts, self.cos, self.sin, False)
                )
                return flash_ext.attention(
                    *(q, k_pages, v_pages),
                    cu_seqlens_q=starts,
                    max_seqlen_q=longest,
                    seqused_k=seqused_k,
                    page_table=table,
                    causal=True,
                )

            return attend

        return attend_of

    def int32(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


# ---- without one ---------------------------------------------------------------------------------


def generate_without_cache(model: Decoder, request: Request, dtype: torch.dtype) -> list[int]:
    """The whole text through the model for each new token."""
    device = model.embed.weight.device
    cos, sin = rotary_tables(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.to(dtype)[None] for x in (q, k, v))
        q, k = (flash_ext.apply_rotary_emb(x, cos, sin) for x in (q, k))
        return flash_ext.attention(q, k, v, causal=True)[0]

    tokens = list(request.prompt)
    for _ in range(request.new_tokens):
        logits = model(torch.tensor(tokens, device=device), lambda layer: attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(request.prompt) :]


# ---- the program ---------------------------------------------------------------------------------


def show_progress(done: int, total: int, label: str) -> None:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        return
    filled = 30 * done // max(total, 1)
    end = "\n" if done == total else ""
    print(
        f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {label:<32}",
        end=end, file=sys.stderr, flush=True,
    )  # fmt: skip


def make_requests(count: int, new_tokens: int, longest: int, seed: int) -> list[Request]:
    """Prompts of random bytes of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for _ in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        prompt = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        more = int(
            torch.randint(max(new_tokens // 2, 1), new_tokens + 1, (1,), generator=generator)
        )
        requests.append(Request(prompt, more))
    return requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=24, help="of a request, at most")
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--batch", type=int, default=6, help="requests that run at once, at most")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a prompt a step, at most")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("requests", "new_tokens", "longest_prompt", "batch", "chunk", "page_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if options.longest_prompt + options.new_tokens > LONGEST:
        parser.error(f"--longest-prompt and --new-tokens must stay below {LONGEST} together")

    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # of the cache
    torch.manual_seed(options.seed)
    model = Decoder().to(device)
    requests = make_requests(
        options.requests, options.new_tokens, options.longest_prompt, options.seed
    )
    total = sum(r.new_tokens for r in requests)

    # A pool for about half of what may run at once at its longest: requests wait for pages.
    longest = options.longest_prompt + options.new_tokens
    num_pages = -(-longest // options.page_size) * max(options.batch // 2, 1)
    cache = PagedCache(num_pages, options.page_size, device, dtype)
    engine = Engine(model, cache, options.chunk, options.batch)
    waiting, finished, steps, most = list(requests), 0, 0, 0
    begin = time.perf_counter()
    with torch.inference_mode():
        while waiting or engine.running:
            engine.admit(waiting)
            most = max(most, len(engine.running))
            finished += len(engine.step())
            steps += 1
            show_progress(finished, len(requests), f"with pages, step {steps}")
    with_cache = time.perf_counter() - begin
    assert sorted(cache.free) == list(range(num_pages)), "a page was lost"

    begin, wrong = time.perf_counter(), 0
    with torch.inference_mode():
        for index, request in enumerate(requests):
            show_progress(index, len(requests), "without a cache")
            wrong += generate_without_cache(model, request, dtype) != request.generated
        show_progress(len(requests), len(requests), "without a cache")
    without = time.perf_counter() - begin

    print(
        f"{len(requests)} requests, prompts of 1 to {options.longest_prompt} bytes, {total} tokens"
    )
    print(f"pages: {num_pages} of {options.page_size} keys; at most {most} requests at once")
    print(f"with a cache:    {steps} steps, {with_cache:.2f} s, {total / with_cache:.0f} tokens/s")
    print(f"without a cache: {total} calls, {without:.2f} s, {total / without:.0f} tokens/s")
    if wrong:
        print(f"{wrong} of {len(requests)} requests differ from generation without a cache")
        return 1
    print("every token equals generation without a cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
