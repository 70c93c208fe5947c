"""What works on any model with quest_core attention: monitor, calibration, packing, several devices."""
