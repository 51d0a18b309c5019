"""INT4 weights in SGLang's linear layers: alone, as a draft, or beside the full-precision ones.

    precision.py      which of a layer's two weights runs, read at every call
    settings.py       calibration, excluded layers, output head; the names of the --sdsie-int4-* flags
    calibration.py    from a weight to four-bit codes, with and without a little text
    weight.py         one layer's INT4 weight and its product
    method.py         SGLang linear methods: INT4 alone, or both
    quantization.py   `--quantization sdsie_int4`: SGLang's configuration of it, and its registration
    both.py           gives a loaded model a second, INT4 weight in each linear layer (the self-draft)
    head.py           an INT4 output head
    checks.py         what cannot be served, told before weights are loaded
    checkpoint.py     the saved form, which SGLang reloads (its names: checkpoint_format.py)
    activations.py    what layers are given for a little text
    quantize.py       python -m sdsie_sglang.int4.quantize MODEL OUT

Tensor-parallel shards and fused QKV and gate/up layers are right by construction: what is quantised is
the weight that lies on the rank, after SGLang has loaded and fused it.
"""
