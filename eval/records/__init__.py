"""Records of runners: their schemas, reports and plots."""
