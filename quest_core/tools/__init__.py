"""What works on any model with quest_core attention: measuring, calibration, packing, several devices."""
