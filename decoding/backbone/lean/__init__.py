"""A forward of few tokens with less around its matrix products: one loop over the layers, two ways to run a layer.

Start with `forward.py`; `on_cpu.py` and `on_cuda.py` are the ways, `families.py` the models that they know.
"""
