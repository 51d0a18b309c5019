"""An SGLang plugin for one test: the INT4 weight of a layer that holds both is its full-precision one."""


def register():
    from sdsie_sglang.int4.method import DualLinearMethod

    DualLinearMethod.apply = lambda self, layer, x, bias=None: self._plain.apply(layer, x, bias)
