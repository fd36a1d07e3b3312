"""Of which class an operator or a kernel is, by its name."""

import re

from refshard.tracing.operators.operator_figures import CLASSES, OperatorClass

_BY_OPERATOR: tuple[tuple[OperatorClass, str], ...] = (
    ("communication", r"^(?:c10d|_c10d_functional|gloo|nccl|symm_mem)::?|^record_param_comms|^gloo:|^emulated:"),
    ("attention", r"attention|flash_attn|fmha|sdpa|^aten::_(?:flash|efficient)_"),
    ("convolution", r"conv(?:olution|\d?d)?(?:_|$|Back)|convolution"),
    ("GEMM", r"^aten::_?(?:\w*mm(?:_|_v2|_activation)?|linear(?:_backward)?|matmul|v?dot|mv|addmv_?|bilinear)$"
             r"|_linear|(?<!fb)gemm|matmul"),
    ("optimizer", r"_fused_(?:adam|adamw|sgd|adagrad)|(?:Adam|AdamW|SGD|Muon|Lion|Adafactor)\b"),
    ("normalisation", r"(?:layer|batch|group|rms|instance)_?norm|softmax"),
    ("copies", r"^aten::(?:copy_|clone|contiguous|cat|stack|fill_|zero_|_to_copy|index_copy_|_foreach_copy_|"
               r"split_with_sizes_copy|chunk_cat|pad|constant_pad_nd|repeat|roll|flip)$|^fsdp::"),
    ("elementwise", r"^aten::(?!embedding|index|scatter|gather|sort|topk|argmax|multinomial|cumsum|nonzero|unique)"),
)  # fmt: skip
_BY_KERNEL: tuple[tuple[OperatorClass, str], ...] = (
    ("attention", r"flash_(?:fwd|bwd|attn)|flash::|FlashAttn|(?<![a-z])f?mha|attention|attn_?(?:fwd|bwd)"),
    ("convolution", r"conv(?:olution)?[_\dA-Z<]|fprop|dgrad|wgrad|winograd|scudnn|hcudnn|^igemm_|miopen(?!batch)|im2"),
    ("GEMM", r"(?<!fb)gemm|gemv|nvjet|^Cijk_|_mm_|matmul|splitK|^bmm_|\bmm_kernel|tem_fused_\w*mm"),
    ("optimizer", r"adam|sgd_|FusedOptimizer"),
    ("normalisation", r"(?:layer|batch|group|rms)_?norm|bn_[fb]w|softmax|triton_\w*norm"),
    ("copies", r"^Memcpy|^Memset|CatArray|copy_kernel|transpose|direct_copy|FillFunctor|nchwTo|nhwcTo"),
    ("elementwise", r"elementwise|reduce_kernel|triton_(?:poi|red|per)_|distribution_|dropout|activation|^triton__"),
)  # fmt: skip


def _compiled(rules: tuple[tuple[OperatorClass, str], ...]) -> tuple[tuple[int, re.Pattern[str]], ...]:
    return tuple((CLASSES.index(name), re.compile(rule, re.IGNORECASE)) for name, rule in rules)


_OPERATORS, _KERNELS = _compiled(_BY_OPERATOR), _compiled(_BY_KERNEL)
OTHERS = CLASSES.index("others")
SURE = tuple(CLASSES.index(name) for name in ("GEMM", "attention", "convolution"))
"""What an operator of these does is the same wherever it stands, in an optimizer's step too."""


def class_of_operator(name: str) -> int:
    """The code in :data:`CLASSES` of an operator; others where its name does not tell.

    >>> CLASSES[class_of_operator("aten::addmm")], CLASSES[class_of_operator("aten::mul_")]
    ('GEMM', 'elementwise')
    """
    return next((code for code, rule in _OPERATORS if rule.search(name)), OTHERS)


def class_of_kernel(name: str) -> int:
    """The same of a kernel.

    >>> CLASSES[class_of_kernel("nvjet_tst_64x16_64x16_2x4_2cta_h_bz_bias_TNT")]
    'GEMM'
    """
    return next((code for code, rule in _KERNELS if rule.search(name)), OTHERS)
