"""Benchmark tasks;"""
