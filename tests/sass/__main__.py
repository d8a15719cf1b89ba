"""Prints the table of the kernels: python -m sass, in the folder tests."""

from .disassembly import ARCHS, kernels


def main() -> None:
    print("| kernel | sm | registers | spilled bytes | 128-bit loads | stores | instructions/element |")
    print("|---|---|---|---|---|---|---|")
    for k in sorted((k for arch in ARCHS for k in kernels(arch)), key=lambda k: (k.name, k.arch)):
        print(
            f"| {k.name} | {k.arch} | {k.registers} | {k.spill_bytes} | {k.wide_loads} | {k.wide_stores} "
            f"| {k.instructions_per_element:.1f} |"
        )


if __name__ == "__main__":
    main()
