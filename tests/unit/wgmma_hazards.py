"""Finds machine code that overwrites what a tensor-core instruction may still be reading.

``wgmma`` with its first operand in registers (SASS: HGMMA) goes on reading them after the next instructions have
started, until a wait for its group (WARPGROUP.DEPBAR). PTX leaves the registers to the programmer
(https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group),
and Triton relies on ptxas, which does not always keep them (https://github.com/triton-lang/triton/issues/9433).
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPERAND_REGISTERS = 4  # of an m64k16 operand of 16-bit floats
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;")
LABEL = re.compile(r"\s*(\.L_\w+):")
NO_RESULT = {
    "BAR", "BRA", "BSSY", "BSYNC", "CCTL", "DEPBAR", "EXIT", "FENCE", "FSETP", "HGMMA", "ISETP", "LDGDEPBAR", "LDGSTS",
    "MEMBAR", "NOP", "PLOP3", "R2UR", "RED", "RET", "ST", "STG", "STS", "SYNCS", "UTMALDG", "WARPGROUP", "WARPSYNC",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    text: str
    name: str  # with its suffixes
    operands: tuple[str, ...]
    guarded: bool

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    def written(self) -> set[int]:
        """General registers that it writes."""
        first = re.match(r"R(\d+)\b", self.operands[0]) if self.operands else None
        if first is None or self.base in NO_RESULT:
            return set()
        width = 4 if ".128" in self.name else 2 if re.search(r"\.64|\.WIDE", self.name) else 1
        if self.base == "LDSM":
            width = int(self.name[-1]) if self.name[-1] in "24" else 1
        return set(range(int(first[1]), int(first[1]) + width))

    def read_late(self) -> set[int]:
        """Registers that an HGMMA reads after it was issued, besides its sums, whose order the hardware keeps."""
        first = re.match(r"R(\d+)\b", self.operands[1]) if self.base == "HGMMA" and len(self.operands) > 1 else None
        return set(range(int(first[1]), int(first[1]) + OPERAND_REGISTERS)) if first else set()


def disassemble(cubin: bytes, folder: Path, nvdisasm: str) -> str:
    """SASS of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and which one each label stands before."""
    instructions: list[Instruction] = []
    labels = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.search(line):
            operands = tuple(part.strip() for part in found["operands"].split(","))
            text = f"{found['name']} {found['operands']}"
            instructions.append(Instruction(text, found["name"], operands, bool(found["guard"])))
    return instructions, labels


def hazards(sass: str) -> list[str]:
    """``HGMMA …: overwritten by …`` for each register operand that is written on some path before its group's wait."""
    instructions, labels = parse(sass)
    found = []
    for start, product in enumerate(instructions):
        if not (operand := product.read_late()):
            continue
        seen: set[tuple[int, int]] = set()
        waiting = [(start, -1)]  # next instruction; groups committed since the product, its own not counted
        while waiting:
            here, groups = waiting.pop()
            if (here, groups) in seen or here >= len(instructions):
                continue
            seen.add((here, groups))
            now = instructions[here]
            if now.written() & operand:
                found.append(f"{product.text}: overwritten by {now.text}")
                continue
            if now.base == "HGMMA" and "gsb0" in now.operands:  # commits all since the last one
                groups += 1
            if now.name.startswith("WARPGROUP.DEPBAR") and 0 <= int(now.operands[1], 16) <= groups:
                continue
            if now.base == "BRA" and (label := re.search(r"\.L_\w+", now.text)):
                waiting.append((labels[label[0]], groups))
            conditional = now.guarded or now.operands[0].startswith(("P", "!P", "UP", "!UP"))
            if now.base not in ("BRA", "EXIT", "RET") or conditional:
                waiting.append((here + 1, groups))
    return found
