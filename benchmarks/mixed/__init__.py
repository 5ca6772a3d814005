"""Requests that gain much beside requests that gain little, in one batch: what do prices lose?"""
