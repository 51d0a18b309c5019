"""An SGLang plugin for one test: from the fifth decision on, the second tensor-parallel rank decides otherwise."""


def register():
    from sglang.srt.runtime_context import get_parallel

    from sdsie_sglang.worker.gate import Gate

    decide = Gate.next_gear

    def next_gear(self, states):
        k = decide(self, states)
        return 0 if get_parallel().tp_rank == 1 and self.cycles >= 5 else k

    Gate.next_gear = next_gear
