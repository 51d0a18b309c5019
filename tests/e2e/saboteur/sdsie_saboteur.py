"""An SGLang plugin for one test: cuts the wire between the gate's decision and the worker's gear."""


def register():
    from sdsie_sglang.worker.worker import SdsieWorker

    SdsieWorker._shift = lambda self, k: None
