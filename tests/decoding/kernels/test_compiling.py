"""Every kernel of the lean forward is compiled for GPUs as real shapes launch it; no GPU is needed for that.

The interpreter accepts what the compiler refuses, and neither says that a block does not fit a multiprocessor's memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton")

COMPILE = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

architecture = int(sys.argv[1])
KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.bool: "*i1", torch.int32: "*i32"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
built = {}

def kind_of(parameter, value):
    if parameter.is_constexpr or value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return {bool: "i1", int: "i32", float: "fp32"}[type(value)]

def run(self, *args, grid, warmup, **named):
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    given = dict(zip(self.arg_names, args)) | named
    signature = {each.name: kind_of(each, given[each.name]) for each in self.params}
    constants = {name: given[name] for name, kind in signature.items() if kind == "constexpr"}
    key = str((self.__name__, signature, constants, options))
    if key not in built:
        source = ASTSource(fn=self, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        built[key] = [self.__name__, made.metadata.shared]

JITFunction.run = run
from draftsmith.decoding.kernels import attend, layer, product

def new(*sizes):
    return torch.randn(sizes, dtype=torch.bfloat16)

for Q, G, D, H, I, normed in ((32, 8, 128, 4096, 12288, True), (32, 8, 64, 2048, 8192, False)):
    for N in (1, 5, 65):
        stores = new(1, G, 1152, D), new(1, G, 1152, D)
        norms = (new(D), new(D)) if normed else None
        turn = new(1, N, D), new(1, N, D)
        layer.enter(new(1, N, H), None, None, new(H), 1e-6, from_one=False)
        layer.enter(new(1, N, H), new(1, N, H), None, new(H), 1e-6, from_one=False)
        slots = torch.arange(N)[None]
        layer.place_heads(new(1, N, (Q + 2 * G) * D), norms, turn, stores, slots, 1e-6, from_one=False)
        layer.gated(new(1, N, 2 * I), by_tanh=False)
        mask = torch.ones(1, 1, N, 1152, dtype=torch.bool)
        attend.attend(new(1, Q, N, D), *stores, mask, 1152, D**-0.5)
        if N <= product.MOST_ROWS:
            for out, inner in (((Q + 2 * G) * D, H), (2 * I, H), (H, I)):
                product.product(new(1, N, inner), torch.empty(out, inner, dtype=torch.bfloat16), None)
print(json.dumps(list(built.values())))
"""
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a block may have of a multiprocessor's memory, by architecture."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MOST_SHARED)
def test_every_kernel_compiles_and_fits(architecture: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", COMPILE, str(architecture)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout.splitlines()[-1])
    assert len({name for name, _ in built}) >= 5
    assert {name: shared for name, shared in built if shared > MOST_SHARED[architecture]} == {}
