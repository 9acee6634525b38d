"""AdaccSession and AdaccCallback in other frameworks: Lightning, axolotl, ms-swift."""
