"""Invariants of tree verification: a path of a tree is a chain, and committing it is plain decoding."""

from collections.abc import Callable

import numpy as np
import pytest
from model.test_cache_invariants import assert_same_state, open_cache, state_of
from support.goldens import target_golden

import pydflash
from pydflash import InvalidArgumentError
