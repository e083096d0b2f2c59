import { useComputedColorScheme } from '@mantine/core'
import { mark } from '../format'

/** Colours of charts in one colour scheme. */
export interface Palette {
  ink: string
  soft: string
  rule: string
  accent: string
  pale: string
  middle: string
  warm: string
  good: string
  bad: string
  paper: string
  /** One for each expert, in the order of the study file; the report has the same. */
  experts: readonly string[]
  /** Of a diverging scale: negative, zero, positive. */
  diverging: readonly [string, string, string]
}

const LIGHT: Palette = {
  ink: '#1c1e21',
  soft: '#5d636b',
  rule: '#e3e4e0',
  accent: '#2f5fa8',
  pale: '#c9d3e0',
  middle: '#8ba6cf',
  warm: '#b5651d',
  good: '#2c7a52',
  bad: '#b3382c',
  paper: '#fdfdfb',
  experts: ['#3d6db5', '#d98038', '#45976c', '#a35a93', '#bfa22f', '#c9544d', '#4b9db3', '#7c6a5a'],
  diverging: ['#b5651d', '#fdfdfb', '#2f5fa8'],
}

const DARK: Palette = {
  ink: '#e6e7e8',
  soft: '#a2a8b0',
  rule: '#2c3035',
  accent: '#8db3f0',
  pale: '#485566',
  middle: '#6b84ab',
  warm: '#e0a064',
  good: '#6cc193',
  bad: '#ee8377',
  paper: '#15171a',
  experts: ['#6b99de', '#e29a5c', '#66b88c', '#c583b6', '#d3b955', '#e27c75', '#6cbdd3', '#a8937f'],
  diverging: ['#e0a064', '#15171a', '#8db3f0'],
}

export function usePalette(): Palette {
  return useComputedColorScheme('light') === 'dark' ? DARK : LIGHT
}

/** Options of an axis in the page's colours. */
export const axis = (p: Palette, name: string, extra: object = {}) => ({
  name,
  nameLocation: 'middle' as const,
  nameGap: 30,
  nameTextStyle: { color: p.soft },
  axisLine: { lineStyle: { color: p.rule } },
  axisLabel: {
    color: p.soft,
    hideOverlap: true,
    formatter: (at: number | string) => (typeof at === 'number' ? mark(at) : at),
  },
  splitLine: { lineStyle: { color: p.rule } },
  scale: true,
  ...extra,
})

/** Options of a series of points that stay in sight below those that are selected. */
export const paleSeries = (p: Palette) => ({
  type: 'scatter',
  z: 1,
  large: true,
  largeThreshold: 1500,
  symbolSize: 3,
  itemStyle: { color: p.soft, opacity: 0.35 },
})
