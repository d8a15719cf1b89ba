"""Faults by hand: each a mistake that people make in code like this."""

from __future__ import annotations

from dataclasses import dataclass

from .source import Edit

__all__ = ["PLANTED", "Fault"]

KERNEL = "csrc/cuda/adam_kernel.cuh"
FORMATS = "csrc/cuda/vectors.cuh"
LAUNCHER = "csrc/cuda/adam.cu"
CONVERT = "csrc/cuda/convert.cu"
GENERIC_KERNEL = "csrc/cuda/generic_kernel.cuh"
ELEMENTS = "csrc/cuda/elements.cuh"
GENERIC_CONVERT = "csrc/cuda/generic_convert.cuh"
GENERIC_LAUNCHER = "csrc/cuda/generic.cu"
SCALED = "csrc/scaled_formats.h"
TABLE = "csrc/tensor_table.h"
RULE = "csrc/adam_rule.h"
NUMBERS = "csrc/number_formats.h"


@dataclass(frozen=True)
class Fault:
    name: str
    edits: tuple[Edit, ...]


def _fault(name: str, *edits: tuple[str, str, str]) -> Fault:
    return Fault(name, tuple(Edit(*edit) for edit in edits))


PLANTED = [
    _fault(
        "index off by one",
        (KERNEL, "rest += (end - begin) / kVector * kVector;", "rest += (end - begin) / kVector * kVector + 1;"),
    ),
    _fault(
        "32-bit index",
        (
            KERNEL,
            "const int64_t first = (chunk - row.first_chunk) * kBlockElements;",
            "const int first = (int)(chunk - row.first_chunk) * kBlockElements;",
        ),
    ),
    _fault(
        "32-bit index in conversion",
        (
            CONVERT,
            "for (int64_t i = a.head + thread * kVector; i + kVector <= a.n;",
            "for (int i = (int)a.head + (int)thread * kVector; i + kVector <= a.n;",
        ),
    ),
    _fault("missing tail", (KERNEL, "k < head + end - rest", "k < head")),
    _fault("missing head", (KERNEL, "if (first == 0) head = row.head;", "")),
    _fault(
        "head updated by every block",
        (KERNEL, "if (first == 0) head = row.head;", "head = row.head;"),
    ),
    _fault("missing tail in conversion", (CONVERT, "if (tail + thread < a.n)", "if (tail + thread + 1 < a.n)")),
    _fault(
        "swapped m and v",
        (LAUNCHER, "row.exp_avg, row.exp_avg_sq", "row.exp_avg_sq, row.exp_avg"),
    ),
    _fault(
        "swapped m and v in the tail",
        (
            KERNEL,
            "adam_update(p, Grad::load_one(grad + i), m, v, s);",
            "adam_update(p, Grad::load_one(grad + i), v, m, s);",
        ),
    ),
    _fault(
        "decay after update",
        (RULE, "else p = rn_mul(p, s.decay);", ""),
        (
            RULE,
            "p = rn_fnma(s.step_size, rn_div(m, denominator), p);",
            "p = rn_fnma(s.step_size, rn_div(m, denominator), p); if (!s.l2) p = rn_mul(p, s.decay);",
        ),
    ),
    _fault("wrong alignment test", (LAUNCHER, "% 16 == 0;", "% 8 == 0;")),
    _fault("alignment of the weight unchecked", (LAUNCHER, "if (aligned(r.param, f.param, i) &&", "if (")),
    _fault(
        "lost tensors after an empty one",
        (LAUNCHER, "if (rows[i].numel) batch.add(rows[i], *", "if (!rows[i].numel) break; else batch.add(rows[i], *"),
    ),
    _fault("unguarded store", (KERNEL, "i + kVector <= end;", "i < end;")),
    _fault("unguarded store in conversion", (CONVERT, "i + kVector <= a.n;", "i < a.n;")),
    _fault("wrong rounding", (FORMATS, '"cvt.rn.bf16x2.f32 %0, %1, %2;"', '"cvt.rz.bf16x2.f32 %0, %1, %2;"')),
    _fault(
        "wrong rounding of single elements",
        (FORMATS, "*to = bfloat16_store_bits(x);", "*to = (uint16_t)(bits_of(x) >> 16);"),
    ),
    _fault(
        "halves of a pair swapped",
        (FORMATS, "cvt_rn_bf16x2(x[2 * k + 1], x[2 * k])", "cvt_rn_bf16x2(x[2 * k], x[2 * k + 1])"),
    ),
    _fault("missing NaN rule", (KERNEL, "const bool nan = any_nan(p);", "const bool nan = false;")),
    _fault("missing NaN rule in conversion", (CONVERT, "To::store(to, x, any_nan(x));", "To::store(to, x, false);")),
    _fault(
        "beta power off by one",
        (
            RULE,
            "const uint64_t t = step > 0.0f ? (uint64_t)step : 0;",
            "const uint64_t t = step > 1.0f ? (uint64_t)step - 1 : 0;",
        ),
    ),
    _fault(
        "scalars of the step before on the device",
        (KERNEL, "adam_scalars(options, step,", "adam_scalars(options, step - 1.0f,"),
    ),
    _fault("table overrun", (LAUNCHER, "parameters_->rows == kMaxRows", "parameters_->rows > kMaxRows")),
    _fault("scalars overrun", (LAUNCHER, "steps_.size() == kMaxScalars", "steps_.size() > kMaxScalars")),
    _fault("rows of one launch repeated in the next", (LAUNCHER, "parameters_->rows = parameters_->chunks = 0;", "")),
    _fault(
        "search that stops a row early",
        (KERNEL, "a.row[middle].first_chunk <= chunk", "a.row[middle].first_chunk < chunk"),
    ),
    _fault(
        "every chunk by every block", (KERNEL, "chunk = blockIdx.x; chunk < a.chunks;", "chunk = 0; chunk < a.chunks;")
    ),
    _fault(
        "found_inf ignored",
        (LAUNCHER, "parameters_->found_inf = (const float *)found_inf;", "parameters_->found_inf = nullptr;"),
    ),
    _fault(
        "counters advance on a skipped step",
        (KERNEL, "i >= a.steps || (a.found_inf && *a.found_inf != 0.0f)", "i >= a.steps"),
    ),
    _fault("lr of the device ignored", (KERNEL, "if (a.lr) options.lr = *a.lr;", "")),
    _fault(
        "last launch not flushed",
        (
            LAUNCHER,
            "*(const float *)rows[i].step, grad_scale); batch.flush();",
            "*(const float *)rows[i].step, grad_scale);",
        ),
    ),
    _fault("root of zero", (NUMBERS, "return a == 0.0f ? a : root;", "return root;")),
    _fault("quotient of zero", (NUMBERS, "return a == 0.0f ? __fmul_rn(quotient, a) : quotient;", "return quotient;")),
    _fault(
        "weights that round to their master overwritten", (CONVERT, "x[k] = differs ? w[k] : x[k];", "x[k] = w[k];")
    ),
    _fault(
        "scale of a short last block lost",
        (
            GENERIC_KERNEL,
            "scale_of(e.exp_avg_scale, block), words);",
            "count == kVector ? scale_of(e.exp_avg_scale, block) : scale_of(e.exp_avg_scale, 0), words);",
        ),
    ),
    _fault(
        "largest of half a warp",
        (
            ELEMENTS,
            "scale_bits<Payload>(__reduce_max_sync(kAllLanes, largest), kRoot)",
            "scale_bits<Payload>(__reduce_max_sync(threadIdx.x & 16 ? 0xffff0000u : 0xffffu, largest), kRoot)",
        ),
    ),
    _fault(
        "lanes without elements leave their warp",
        (GENERIC_KERNEL, "const float scale1 =", "if (count == 0) return; const float scale1 ="),
    ),
    _fault("scale read by every lane", (ELEMENTS, "lane == 0 ? *scale : 0.0f", "*scale")),
    _fault(
        "random bits of another tensor",
        (GENERIC_KERNEL, "(uint32_t)e.ordinal, tensor, step)", "(uint32_t)e.ordinal, kExpAvgBits, step)"),
    ),
    _fault(
        "random bits of the step before",
        (GENERIC_KERNEL, "*row.device_step : row.step;", "*row.device_step : row.step - 1;"),
    ),
    _fault(
        "random bits of a captured step",
        (GENERIC_KERNEL, "row.device_scalars ? *row.device_step : row.step;", "row.step;"),
    ),
    _fault("random group of 32 bits", (GENERIC_KERNEL, "uint64_t number = 0;", "uint32_t number = 0;")),
    _fault(
        "levels of the index map swapped",
        (TABLE, "if (++c->inner != (uint64_t)row.size1) return;", "if (++c->inner != (uint64_t)row.size0) return;"),
        (TABLE, "if (++c->middle != (uint64_t)row.size0) return;", "if (++c->middle != (uint64_t)row.size1) return;"),
    ),
    _fault(
        "second moment rounded to zero",
        (ELEMENTS, "if (kRoot) payload |= (uint32_t)((payload == 0) & (x[k] != 0.0f));", ""),
    ),
    _fault(
        "NaN stored as the largest number of its block",
        (ELEMENTS, "*ordinary = largest < 0x7f800000u;", "*ordinary = true;"),
    ),
    _fault(
        "NaN of FP8 read as a number",
        (
            SCALED,
            "return fabsf(number) > float_of(Payload::kLargest) ? float_of(kQuietNan) : number;",
            "return number;",
        ),
    ),
    _fault(
        "parameter rounded from a master before it was stored",
        (GENERIC_KERNEL, "if (is_scaled(f.master)) numbers_of<MasterStream>(f.master, words, scale, p);", ""),
    ),
    _fault(
        "table of the generic kernel overrun",
        (GENERIC_LAUNCHER, "parameters_->rows == kMaxGenericRows", "parameters_->rows > kMaxGenericRows"),
    ),
    _fault(
        "lanes without a change not refreshed",
        (
            GENERIC_CONVERT,
            "PhiloxBlock{}, lane, scale, masters); } else if",
            "PhiloxBlock{}, lane, scale, masters); if (!changed) return; } else if",
        ),
    ),
    _fault(
        "lanes without a change leave their warp",
        (GENERIC_CONVERT, "if (!__reduce_max_sync(kAllLanes, changed)) return;", "if (!changed) return;"),
    ),
]
