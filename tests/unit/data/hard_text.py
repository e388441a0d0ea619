"""Texts that tokenizers tend to change."""

HARD = [
    "", " ", "  ", "\n", "\n\n\n", " \n ", "\t\tx\t", "a\x0cb", "a\r\nb\rc", "a\0b\0", "\x1b[0m\x7f", "x   ", "   x",
    "▁", "▁▁▁", "a▁b", " ▁ ▁", "▁ a", "▁a\n▁", "\n▁", "▅", "⁇", " ⁇ ", "<s>a</s><unk><pad>", "<0x0A><0xE2>", "\ufffd",
    "\ufeffbom", "ﬁ Ⅵ ｱ é e\u0301", "😀👩‍👩‍👧 中文 עברית", "\u2028\u2029\x85\xa0\u200b\u3000", "\U0010ffff",
    "def f(x):\n    return x**2\n", "if x:\n\tif y:  \n\t\tpass\t\n", "".join(map(chr, range(32))) + "\x7f", " " * 999,
    "\u00e9 e\u0301 \u0130 \u1e9b\u0323 \uac00\u1100\u1161",
    "\u200f\u05e9\u05c1\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627\u064b \u202bx\u202c",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",
    "<|endoftext|></s>", "'s 'LL don't", "1234567 ½ ² ٣",
]  # fmt: skip
