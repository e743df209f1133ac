"""`python -m ring_attention_pytorch`: a doctor of installations, a demo, and plans explained."""
