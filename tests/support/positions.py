"""Layouts, lengths and rings that tests of arithmetic draw."""

from hypothesis import settings
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.layouts import LAYOUTS

quickly = settings(deadline=None, max_examples=60)
layouts = st.sampled_from(sorted(LAYOUTS))
lengths = st.integers(0, 70)
ring_sizes = st.integers(1, 9)
