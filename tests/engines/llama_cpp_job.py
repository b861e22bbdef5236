"""llama.cpp's own converter, run by the Python of the engines' environment: `llama_cpp_job.py SOURCE OUT WORD...`.

OUT.gguf is what the converter writes of its WORDs, OUT.npz and OUT.json what its own reader reads of that.
What is done to the converter: it knows tokenizers by a hash of what they make of a text, and refuses
others; one that it does not know, the embedded target's, is told to be of GPT-2's kind, which it is (byte-level
pieces, GPT-2's pattern).
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:3])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def kind_of(self: TextModel, tokenizer: object) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = kind_of
    made = out.with_suffix(".gguf")
    sys.argv[1:] = [*sys.argv[3:], "--outtype", "f32", "--outfile", str(made)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")

    import gguf

    reader = gguf.GGUFReader(made)
    fields = {name: each.contents() for name, each in reader.fields.items() if not name.startswith("tokenizer")}
    np.savez(out.with_suffix(".npz"), **{tensor.name: tensor.data for tensor in reader.tensors})
    out.with_suffix(".json").write_text(json.dumps(fields))
