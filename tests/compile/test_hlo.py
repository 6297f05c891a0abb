"""VMEM from the optimized module."""

from __future__ import annotations

from capibara.compile.hlo import HloKernel, hlo_kernels

# Stand-ins keep the lines of the module short.
PARTS = {
    "LIMIT": '"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"16777216"}]',
    "USED": '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"2097152"},OTHER]',
    "OTHER": '{"memory_space":"5","offset":"0","size":"64"}',
    "SMALL": '"used_scoped_memory_configs":[{"memory_space":1,"offset":0,"size":12288}]',
    "NOTHING": '"used_scoped_memory_configs":[]',
    "TILED": "{1,0:T(8,128)(2,1)}",
}
MODULE = """HloModule jit_fn, is_scheduled=true

ENTRY %main.1 (Arg_0.1: f32[1024]) -> f32[1024] {
  %Arg_0.1 = f32[1024]{0:T(1024)} parameter(0), backend_config={LIMIT,NOTHING}
  %flash.3 = (bf16[8,128]TILED, f32[8]{0:T(128)}) custom-call(%Arg_0.1), backend_config={LIMIT,USED}
  ROOT %add_fusion = f32[1024]{0:T(1024)} fusion(%Arg_0.1), kind=kLoop, backend_config={SMALL}
}
"""
for word, text in PARTS.items():
    MODULE = MODULE.replace(word, text)


def test_kernels():
    assert hlo_kernels(MODULE) == [
        HloKernel("flash.3", "custom-call", 2097152, 16777216),
        HloKernel("add_fusion", "fusion", 12288, None),
    ]


def test_a_module_of_another_platform():
    assert hlo_kernels("ENTRY %main { ROOT %dot = f32[2,2]{1,0} dot(%a, %b) }") == []
    assert hlo_kernels("") == []
