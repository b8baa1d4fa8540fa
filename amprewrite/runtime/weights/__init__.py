"""Handle weights that are not plain fp32 (fp16 or bf16 before the rewrite, or frozen), and find out how graphs read weights."""
