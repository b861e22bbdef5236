"""A forward of few tokens with less around its matrix products: one loop over the layers, a runner for each device.

Start with `forward.py`; `on_cpu.py` and `on_cuda.py` run a layer, `families.py` lists the models that they know.
"""
