{{/* Name of the release's objects, and of its RayCluster. */}}
{{- define "ms.name" -}}
{{- if contains "mergesearch" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-mergesearch{{ end }}
{{- end }}

{{/* Labels by which objects are selected. Takes (list root component). */}}
{{- define "ms.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of objects. Takes (list root component). */}}
{{- define "ms.labels" -}}
{{- $root := index . 0 -}}
{{ include "ms.selector" . }}
app.kubernetes.io/name: mergesearch
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* Labels of Ray's pods: without the version, because any change of them ends all pods. Takes (list root component). */}}
{{- define "ms.rayLabels" -}}
{{ include "ms.selector" . }}
app.kubernetes.io/name: mergesearch
{{- end }}

{{/* Reference of an image. Takes (list registry image tag). */}}
{{- define "ms.reference" -}}
{{- $image := index . 1 -}}
{{- with index . 0 }}{{ trimSuffix "/" . }}/{{ end }}{{ $image.repository }}:{{ index . 2 }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "ms.tag" -}}
{{ .Values.image.tag | default (printf "%s-ray%s-%s" .Chart.AppVersion .Values.ray.version .Values.image.variant) }}
{{- end }}

{{- define "ms.image" -}}
{{ include "ms.reference" (list .Values.registry .Values.image (include "ms.tag" .)) }}
{{- end }}

{{- define "ms.postgresImage" -}}
{{- $image := .Values.database.trial.image -}}
{{ include "ms.reference" (list (.Values.registry | default $image.registry) $image $image.tag) }}
{{- end }}

{{- define "ms.headService" -}}
{{ include "ms.name" . }}-head-svc
{{- end }}

{{- define "ms.tokenSecret" -}}
{{ .Values.ray.token.existingSecret | default (printf "%s-ray-token-%d" (include "ms.name" .) (int .Values.ray.token.revision)) }}
{{- end }}

{{- define "ms.accountsSecret" -}}
{{ .Values.accounts.existingSecret | default (printf "%s-accounts" (include "ms.name" .)) }}
{{- end }}

{{/* Init container that gives a user of the server its token. Takes (list root name user key scope login). */}}
{{- define "ms.account" -}}
{{- $root := index . 0 -}}
- name: {{ index . 1 }}
  image: {{ include "ms.image" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [mergesearch, users, add, {{ index . 2 | quote }}]
  args: [--admin, --if-absent, --token-file=/accounts/{{ index . 3 }}, --token-scope={{ index . 4 }}, --login={{ index . 5 }}]
  env:
    - {name: HOME, value: /home/mergesearch}
    {{- include "ms.database" $root | nindent 4 }}
  resources:
    {{- toYaml $root.Values.migration.resources | nindent 4 }}
  securityContext:
    {{- include "ms.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/mergesearch}
    - {name: accounts, mountPath: /accounts, readOnly: true}
{{- end }}

{{- define "ms.databaseSecret" -}}
{{ if .Values.database.trial.enabled }}{{ include "ms.name" . }}-postgres{{ else }}{{ .Values.database.existingSecret }}{{ end }}
{{- end }}

{{- define "ms.dataClaim" -}}
{{ .Values.data.existingClaim | default (printf "%s-data" (include "ms.name" .)) }}
{{- end }}

{{/* Security context of a pod. Takes (list root user). */}}
{{- define "ms.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int (index . 1) }}
runAsGroup: {{ int (index . 1) }}
fsGroup: {{ int (index . 0).Values.security.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ms.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "ms.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where a pod runs. Takes a map with nodeSelector, tolerations, affinity, priorityClassName and runtimeClassName. */}}
{{- define "ms.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" }}
{{- with get $ $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Environment of every process of mergesearch. */}}
{{- define "ms.env" -}}
- {name: HOME, value: /home/mergesearch}
- {name: TMPDIR, value: /tmp}
- {name: MERGESEARCH_CACHE, value: /cache/mergesearch}
- {name: HF_HOME, value: /cache/huggingface}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- if .Values.models.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if eq .Values.logs.format "json" }}
- {name: MERGESEARCH_LOG_FORMAT, value: json}
{{- end }}
{{- with .Values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $.Values.tracing.ratio | quote }}}
{{- end }}
{{- with .Values.models.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
{{- end }}
{{- end }}

{{/* "true" if Ray's pods mount the volume of `data`, else empty. */}}
{{- define "ms.sharesData" -}}
{{- if or (empty .Values.artifacts.url) .Values.data.workers -}}true{{- end -}}
{{- end }}

{{/* The database, for the API, the migration and the head, where drivers run. Engines have no use for it. */}}
{{- define "ms.database" -}}
- name: MERGESEARCH_DATABASE
  valueFrom: {secretKeyRef: {name: {{ include "ms.databaseSecret" . }}, key: {{ .Values.database.key }}}}
{{- end }}

{{/* The nodes for engines, for those who check studies and drive them: the API and the head. */}}
{{- define "ms.engineNodes" -}}
{{- $root := . -}}
{{- $nodes := list -}}
{{- range concat (list (merge (dict "gpus" 0) .Values.ray.cpuGroup)) .Values.ray.gpuGroups -}}
{{- $most := ternary (int $root.Values.kueue.workers) (int .maxReplicas) $root.Values.kueue.enabled -}}
{{- $memory := ternary (printf ",gpu_memory=%sB" (default "" .gpuMemory)) "" (not (empty .gpuMemory)) -}}
{{- if $most -}}
{{- $nodes = append $nodes (printf "gpus=%d,memory=%sB%s,nodes=%d" (int .gpus) .memory $memory $most) -}}
{{- end -}}
{{- end -}}
- {name: MERGESEARCH_ENGINE_NODES, value: {{ join " " $nodes | quote }}}
{{- end }}

{{- define "ms.token" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "ms.tokenSecret" . }}, key: auth_token}}
{{- end }}

{{- define "ms.envFrom" -}}
{{- with .Values.objectStoreSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{/* Mounts that are the same in all pods of mergesearch, because stored jobs name these paths. */}}
{{- define "ms.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/mergesearch}
- {name: cache, mountPath: /cache}
- {name: data, mountPath: /var/lib/mergesearch}
{{- if .Values.models.claim }}
- {name: models, mountPath: {{ .Values.models.path }}, readOnly: true}
{{- end }}
{{- end }}

{{/* Their volumes. Takes (list root data), where `data` is the volume source of the data directory. */}}
{{- define "ms.volumes" -}}
{{- $root := index . 0 -}}
{{- $cache := $root.Values.models.cache -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
- name: cache
  {{- if $cache.hostPath }}
  hostPath: {path: {{ $cache.hostPath }}, type: Directory}
  {{- else if $cache.storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ $cache.storageClass }}
        resources: {requests: {storage: {{ $cache.size }}}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $cache.size }}}
  {{- end }}
- name: data
  {{- index . 1 | nindent 2 }}
{{- with $root.Values.models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{/* Peers and ports of a NetworkPolicy. No peers: any address. */}}
{{- define "ms.peers" -}}
{{ toJson (default list .) }}
{{- end }}

{{- define "ms.ports" -}}
[{{ range $i, $port := . }}{{ if $i }}, {{ end }}{protocol: TCP, port: {{ int $port }}}{{ end }}]
{{- end }}

{{/* Number of GiB, or about it, of a memory quantity. */}}
{{- define "ms.gib" -}}
{{- $units := dict "Mi" 0.0009765625 "M" 0.00095 "Gi" 1.0 "G" 0.93 "Ti" 1024.0 "T" 931.0 -}}
{{ mulf (regexFind "^[0-9]+" . | float64) (get $units (regexFind "[A-Za-z]+$" .)) }}
{{- end }}
