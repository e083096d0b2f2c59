{{/* A container of Ray. Takes (list root group kind study): kind is head or worker; study is that of a RayJob, or empty. */}}
{{- define "ms.rayContainer" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- $kind := index . 2 -}}
name: ray-{{ $kind }}
image: {{ include "ms.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- include "ms.containerSecurity" $root | nindent 2 }}
ports:
  {{- if eq $kind "head" }}
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  {{- end }}
  - {name: metrics, containerPort: 8080}
env:
  {{- include "ms.env" $root | nindent 2 }}
  {{- if eq $kind "head" }}
  {{- include "ms.engineNodes" $root | nindent 2 }}
  {{- end }}
  {{- if and (eq $kind "head") (not (index . 3)) }}
  {{- include "ms.database" $root | nindent 2 }}
  {{- if not (include "ms.sharesData" $root) }}
  # Fine-tunings are refused (service/jobs/finetune/request.py).
  - {name: MERGESEARCH_LOCAL_DATA, value: "1"}
  {{- end }}
  {{- end }}
  # Ray reads these where it is started (service/cluster/session.py).
  - {name: RAY_TRAIN_ENABLE_STATE_TRACKING, value: "1"}
  - {name: RAY_raylet_start_wait_time_s, value: "60"}
  - {name: RAY_agent_register_timeout_ms, value: "300000"}
  - {name: RAY_prestart_worker_first_driver, value: "0"}
  - {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
  - {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
  # Seconds that a driver has to end, longer than it waits for its chunks (service/tune/ray_tune.py).
  - {name: RAY_JOB_STOP_WAIT_TIME_S, value: "90"}
  {{- with $group.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- include "ms.envFrom" $root }}
resources:
  {{- $resources := dict "cpu" $group.cpu "memory" $group.memory }}
  {{- with $group.gpus }}
  {{- $_ := set $resources ($group.gpuResource | default "nvidia.com/gpu") . }}
  {{- end }}
  requests: {{ toJson $resources }}
  limits: {{ toJson $resources }}
volumeMounts:
  {{- include "ms.mounts" $root | nindent 2 }}
  - {name: shm, mountPath: /dev/shm}
  {{- if and (index . 3) (eq $kind "head") }}
  - {name: study, mountPath: /study, readOnly: true}
  {{- end }}
{{- if and (index . 3) (eq $kind "head") }}
# Before Ray stops: the study is interrupted as by Ctrl-C, and ends with everything stored.
lifecycle:
  preStop:
    exec:
      command:
        - python
        - -c
        - |
          import psutil, signal
          def names(process):
              return [part.rpartition("/")[2] for part in (process.info["cmdline"] or ())[1:3]]
          studies = [each for each in psutil.process_iter(["cmdline"]) if names(each) == ["mergesearch", "run"]]
          for study in studies:
              study.send_signal(signal.SIGINT)
          psutil.wait_procs(studies, timeout={{ sub (int $root.Values.kueue.gracePeriodSeconds) 20 }})
{{- end }}
# Only Ray's own agent is asked: an engine that loads for half an hour is no reason to end the pod.
startupProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
readinessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 30
{{- end }}

{{/* Volumes of Ray's pods. Takes (list root group kind study). A study's results are in a volume of its head. */}}
{{- define "ms.rayVolumes" -}}
{{- $root := index . 0 -}}
{{- $isHead := eq (index . 2) "head" -}}
{{- $study := index . 3 -}}
{{- $claim := ternary (printf "%s-%s" (include "ms.name" $root) (get (default dict $study) "name")) (include "ms.dataClaim" $root) (not (empty $study)) -}}
{{- $hasClaim := ternary $isHead (not (empty (include "ms.sharesData" $root))) (not (empty $study)) -}}
{{- include "ms.volumes" (list $root (ternary (printf "persistentVolumeClaim: {claimName: %s}" $claim) "emptyDir: {}" $hasClaim)) }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ (index . 1).shm }}}
{{- if and $study $isHead }}
- name: study
  configMap: {name: {{ $claim }}}
{{- end }}
{{- end }}

{{/* A worker group. Takes (list root group study). */}}
{{- define "ms.workerGroup" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- $tolerated := list (dict "key" ($group.gpuResource | default "nvidia.com/gpu") "operator" "Exists" "effect" "NoSchedule") -}}
groupName: {{ $group.name }}
{{- if $root.Values.kueue.enabled }}
replicas: {{ int $root.Values.kueue.workers }}
minReplicas: {{ int $root.Values.kueue.workers }}
maxReplicas: {{ int $root.Values.kueue.workers }}
{{- else }}
# No `replicas`: Ray's autoscaler owns that field.
minReplicas: {{ int $group.minReplicas }}
maxReplicas: {{ int $group.maxReplicas }}
{{- with $group.idleTimeoutSeconds }}
idleTimeoutSeconds: {{ int . }}
{{- end }}
{{- end }}
rayStartParams: {}
template:
  metadata:
    labels:
      {{- include "ms.rayLabels" (list $root "ray-worker") | nindent 6 }}
    {{- with $group.podAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    serviceAccountName: {{ include "ms.name" $root }}-ray-worker
    automountServiceAccountToken: false
    enableServiceLinks: false
    terminationGracePeriodSeconds: {{ ternary (int $root.Values.kueue.gracePeriodSeconds) 60 $root.Values.kueue.enabled }}
    securityContext:
      {{- include "ms.podSecurity" (list $root $root.Values.security.user) | nindent 6 }}
    {{- include "ms.pullSecrets" $root | nindent 4 }}
    {{- $tolerations := $group.tolerations | default (ternary $tolerated list (gt (int $group.gpus) 0)) }}
    {{- include "ms.placement" (merge (dict "tolerations" $tolerations) (omit $group "tolerations" "affinity")) | nindent 4 }}
    containers:
      - {{- include "ms.rayContainer" (list $root $group "worker" (index . 2)) | nindent 8 }}
    volumes:
      {{- include "ms.rayVolumes" (list $root $group "worker" (index . 2)) | nindent 6 }}
{{- end }}

{{/* Spec of a RayCluster: the release's own, or that of a study. Takes (list root study); study may be empty. */}}
{{- define "ms.rayClusterSpec" -}}
{{- $study := index . 1 -}}
{{- with index . 0 -}}
{{- $root := . -}}
{{- $head := .Values.ray.head -}}
{{- $scales := empty $study -}}
rayVersion: {{ .Values.ray.version | quote }}
authOptions:
  mode: token
  secretName: {{ include "ms.tokenSecret" . }}
enableInTreeAutoscaling: {{ $scales }}
{{- if $scales }}
# A changed spec replaces all pods: nodes of two versions never work together.
upgradeStrategy: {type: Recreate}
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ int .Values.ray.idleTimeoutSeconds }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  resources:
    {{- toYaml .Values.ray.autoscaler.resources | nindent 4 }}
  securityContext:
    {{- include "ms.containerSecurity" . | nindent 4 }}
  env:
    - {name: HOME, value: /home/mergesearch}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/mergesearch}
    - {name: kubernetes-api, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams:
    num-cpus: "0" # drivers run here, trials do not
    dashboard-host: 0.0.0.0
  template:
    metadata:
      labels:
        {{- include "ms.rayLabels" (list . "ray-head") | nindent 8 }}
      annotations:
        cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
        karpenter.sh/do-not-disrupt: "true"
        {{- with $head.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "ms.name" . }}-ray-{{ ternary "head" "worker" $scales }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ ternary 60 (int .Values.kueue.gracePeriodSeconds) $scales }}
      securityContext:
        {{- include "ms.podSecurity" (list . .Values.security.user) | nindent 8 }}
      {{- include "ms.pullSecrets" . | nindent 6 }}
      # Never on a spot node: the head holds the cluster's state.
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: karpenter.sh/capacity-type, operator: NotIn, values: [spot]}
                  - {key: eks.amazonaws.com/capacityType, operator: NotIn, values: [SPOT]}
                  - {key: cloud.google.com/gke-spot, operator: NotIn, values: ["true"]}
                  - {key: kubernetes.azure.com/scalesetpriority, operator: NotIn, values: [spot]}
      {{- include "ms.placement" (omit $head "affinity") | nindent 6 }}
      containers:
        - {{- include "ms.rayContainer" (list . $head "head" $study) | nindent 10 }}
      volumes:
        {{- include "ms.rayVolumes" (list . $head "head" $study) | nindent 8 }}
        {{- if $scales }}
        # The token of the service account, for the autoscaler's container only.
        - name: kubernetes-api
          projected:
            sources:
              - serviceAccountToken: {path: token, expirationSeconds: 3600}
              - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
              - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
        {{- end }}
workerGroupSpecs:
  - {{- include "ms.workerGroup" (list . (merge (dict "name" "cpu" "gpus" 0) .Values.ray.cpuGroup) $study) | nindent 4 }}
  {{- range .Values.ray.gpuGroups }}
  - {{- include "ms.workerGroup" (list $root . $study) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
